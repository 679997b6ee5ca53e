// JSON from outside.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace lockstep::checkpoint {

using Json = nlohmann::json;

// Throws CheckpointError that begins with `where` for what is not JSON, names a key twice in an
// object, or is nested deeper than `depth`.
Json parse_json(std::string_view text, std::string_view where, int depth);

// A string as it may stand in a message: printable, and not too long.
std::string in_quotes(std::string_view text);

}  // namespace lockstep::checkpoint

// JSON as Python's json.dumps(ensure_ascii=False) writes it: chat templates and tau2 do.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace lockstep::rl {

using Json = nlohmann::ordered_json;

// ", " and ": ", the order of insertion, numbers as repr() has them. Bytes that are not UTF-8
// become U+FFFD.
std::string python_json(const Json& value);

// repr() of a Python float.
std::string python_repr(double value);

// Throws Json::exception for what is not JSON, or is nested deeper than 64 levels: what is read
// here is written again by recursion.
Json parse_nested(std::string_view text);

}  // namespace lockstep::rl

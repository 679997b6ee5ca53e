#include "checkpoint/format/json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {

Json parse_json(std::string_view text, std::string_view where, int depth) {
  std::vector<std::set<std::string>> keys;  // of the objects around
  const auto look = [&](int level, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    if (level > depth) {
      throw CheckpointError(fmt::format("{}: JSON nested deeper than {} levels", where, depth));
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw CheckpointError(
          fmt::format("{}: {} comes twice", where, in_quotes(parsed.get<std::string>())));
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), look);
  } catch (const Json::exception& error) {
    throw CheckpointError(fmt::format("{}: is not JSON: {}", where, in_quotes(error.what())));
  }
}

std::string in_quotes(std::string_view text) {
  std::string shown = "'";
  for (const char c : text.substr(0, 200)) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 0x20 || code == 0x7f) {
      shown += fmt::format("\\x{:02x}", code);
    } else {
      shown += c;
    }
  }
  return shown + (text.size() > 200 ? "...'" : "'");
}

}  // namespace lockstep::checkpoint

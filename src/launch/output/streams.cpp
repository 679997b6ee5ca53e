#include "launch/output/streams.h"

#include <fmt/format.h>

#include <optional>

#include "core/number.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

constexpr int kMostRanks = 4096;

std::optional<int> number(std::string_view text, int most) {
  const auto value = whole_number_from<int>(text);
  return value && *value >= 0 && *value <= most ? value : std::nullopt;
}

}  // namespace

StreamChoice StreamChoice::parse(std::string_view flag, std::string_view text) {
  StreamChoice choice;
  if (const auto all = number(text, Out | Err)) {
    choice.everywhere_ = *all;
    return choice;
  }
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const size_t colon = part.find(':');
    const auto rank = number(part.substr(0, colon), kMostRanks - 1);
    const auto streams = colon == part.npos ? std::nullopt : number(part.substr(colon + 1), 3);
    if (!rank || !streams) {
      throw ConfigError(
          fmt::format("[run] {} '{}': give 0 (neither), 1 (stdout), 2 (stderr) or 3 (both), or "
                      "that for some local ranks, such as 0:3,1:1",
                      flag, text));
    }
    choice.some_[*rank] = *streams;
    begin = end + 1;
  }
  return choice;
}

bool StreamChoice::covers(int local_rank, Stream stream) const {
  const auto own = some_.find(local_rank);
  return ((own == some_.end() ? everywhere_ : own->second) & stream) != 0;
}

}  // namespace lockstep::launch

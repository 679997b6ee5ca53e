// Numbers with what they count: "1 rank", "12345 ranks". train/report/text.h has the same with
// commas, so that in lockstep::train this one is called by its full name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

inline std::string counted(int64_t number, std::string_view what) {
  return std::to_string(number) + " " + std::string(what) + (number == 1 ? "" : "s");
}

}  // namespace lockstep

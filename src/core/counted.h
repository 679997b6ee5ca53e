// Numbers with what they count: "1 rank", "2 ranks". train::counted() writes "1,234 steps".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

inline std::string counted(int64_t number, std::string_view what) {
  return std::to_string(number) + " " + std::string(what) + (number == 1 ? "" : "s");
}

}  // namespace lockstep

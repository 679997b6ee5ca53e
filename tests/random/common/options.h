// The command line of a random program: "--name value", any number of times.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>

namespace lockstep::test {

using OptionTarget = std::variant<uint64_t*, int*, double*, std::string*>;

// Throws std::invalid_argument for another name, for what is no number, and without a value.
inline void read_options(int count, char** words,
                         const std::map<std::string_view, OptionTarget>& targets) {
  if (count % 2 == 0) throw std::invalid_argument("an option lacks its value");
  for (int i = 1; i + 1 < count; i += 2) {
    const auto target = targets.find(words[i]);
    if (target == targets.end()) {
      throw std::invalid_argument(std::string("there is no option ") + words[i]);
    }
    const std::string value = words[i + 1];
    if (auto* const* big = std::get_if<uint64_t*>(&target->second)) {
      **big = std::stoull(value);
    } else if (auto* const* whole = std::get_if<int*>(&target->second)) {
      **whole = std::stoi(value);
    } else if (auto* const* real = std::get_if<double*>(&target->second)) {
      **real = std::stod(value);
    } else {
      *std::get<std::string*>(target->second) = value;
    }
  }
}

}  // namespace lockstep::test

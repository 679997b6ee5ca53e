// Words of files and variables, in which upper and lower case are the same.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// Of letters of ASCII alone, in any locale.
inline std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

// Likewise.
inline std::string upper_case(std::string_view text) {
  std::string upper(text);
  for (char& c : upper) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return upper;
}

// What switches something off, as YAML, accelerate and transformers write it: nothing at all, too.
inline bool says_no(std::string_view text) {
  const std::string word = lower_case(text);
  return word.empty() || word == "false" || word == "no" || word == "off" || word == "0" ||
         word == "none";
}

}  // namespace lockstep

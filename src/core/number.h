// Numbers as texts, the same in every locale.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// All bits of it: "-0x1.8p+3".
std::string number_text(double number);

// The number that all of `text` is, as C's strtod() reads it: "1.5", "-0x1.8p+3",
// "inf", "nan"; beyond float64's range infinite or 0. The point is a point, also in a program whose
// locale has a comma. Nothing when it is not a number.
std::optional<double> number_from(const std::string& text);

// The whole number that all of `text` is, in decimal digits: "-17". Nothing when it is none, or is
// not a value of the type.
template <class Whole>
std::optional<Whole> whole_number_from(std::string_view text) {
  Whole value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, status] = std::from_chars(text.data(), end, value);
  return status == std::errc() && stop == end ? std::optional(value) : std::nullopt;
}

}  // namespace lockstep

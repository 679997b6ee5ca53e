// Numbers as texts, the same in every locale.
#pragma once

#include <optional>
#include <string>

namespace lockstep {

// All bits of it: "-0x1.8p+3".
std::string number_text(double number);

// The number that all of `text` is, as C's strtod() reads it: "1.5", "-0x1.8p+3",
// "inf", "nan"; beyond float64's range infinite or 0. The point is a point, also in a program whose
// locale has a comma. Nothing when it is not a number.
std::optional<double> number_from(const std::string& text);

}  // namespace lockstep

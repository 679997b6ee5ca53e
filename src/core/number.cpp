#include "core/number.h"

#include <locale.h>
#include <stdlib.h>

#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>

namespace lockstep {

std::string number_text(double number) {
  const std::string sign = std::signbit(number) ? "-" : "";
  if (std::isnan(number)) return sign + "nan";
  if (std::isinf(number)) return sign + "inf";
  char digits[32];
  const auto end =
      std::to_chars(digits, std::end(digits), std::abs(number), std::chars_format::hex);
  return sign + "0x" + std::string(digits, end.ptr);
}

std::optional<double> number_from(const std::string& text) {
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  if (text.empty() || std::isspace(static_cast<unsigned char>(text.front())) != 0) {
    return std::nullopt;
  }
  char* end = nullptr;
  const double value = strtod_l(text.c_str(), &end, plain);
  if (end != text.c_str() + text.size()) return std::nullopt;
  return value;
}

}  // namespace lockstep

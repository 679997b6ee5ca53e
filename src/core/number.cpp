#include "core/number.h"

#include <locale.h>
#include <stdlib.h>

#include <cctype>

namespace lockstep {

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

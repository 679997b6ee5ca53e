#include "rl/chat/python_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace lockstep::rl {
namespace {

constexpr int kMostLevels = 64;

void write(const Json& value, std::string& out) {
  if (value.is_object() || value.is_array()) {
    const bool is_object = value.is_object();
    out += is_object ? '{' : '[';
    bool is_first = true;
    for (const auto& item : value.items()) {
      if (!is_first) out += ", ";
      is_first = false;
      if (is_object) {
        out += Json(item.key()).dump(-1, ' ', false, Json::error_handler_t::replace);
        out += ": ";
      }
      write(item.value(), out);
    }
    out += is_object ? '}' : ']';
  } else if (value.is_number_float()) {
    out += python_repr(value.get<double>());
  } else {
    out += value.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
}

}  // namespace

std::string python_repr(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  std::array<char, 40> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::scientific)
                       .ptr;
  std::string_view text(buffer.data(), static_cast<size_t>(end - buffer.data()));
  const std::string sign = text.front() == '-' ? "-" : "";
  text.remove_prefix(sign.size());
  const size_t e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  std::string digits;  // the shortest that read back as the same number
  for (const char c : text.substr(0, e)) {
    if (c != '.') digits += c;
  }
  const auto count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    const std::string rest = count > 1 ? "." + digits.substr(1) : "";
    return fmt::format("{}{}{}e{}{:02}", sign, digits[0], rest, exponent < 0 ? '-' : '+',
                       std::abs(exponent));
  }
  if (exponent < 0)
    return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() < whole) digits.resize(whole, '0');
  const std::string fraction = digits.substr(whole);
  return sign + digits.substr(0, whole) + "." + (fraction.empty() ? "0" : fraction);
}

std::string python_json(const Json& value) {
  std::string out;
  write(value, out);
  return out;
}

namespace {

// The library would round a whole number beyond 64 bits, which may be a card's or an order's.
void refuse_too_long(std::string_view number) {
  if (number.find_first_of(".eE") != std::string_view::npos) return;
  int64_t negative = 0;
  uint64_t other = 0;
  const char *begin = number.data(), *end = begin + number.size();
  const auto error = number.front() == '-' ? std::from_chars(begin, end, negative).ec
                                           : std::from_chars(begin, end, other).ec;
  if (error != std::errc::result_out_of_range) return;
  throw Json::other_error::create(
      599, fmt::format("{} is a whole number beyond 64 bits", number.substr(0, 40)), nullptr);
}

}  // namespace

Json parse_nested(std::string_view text) {
  // The library's parser does not recurse, so that depth only matters to those who write.
  int depth = 0;
  bool is_quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_quoted) {
      if (c == '\\') ++i;
      if (c == '"') is_quoted = false;
    } else if (c == '"') {
      is_quoted = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMostLevels) {
        throw Json::other_error::create(
            599, fmt::format("nested deeper than {} levels", kMostLevels), nullptr);
      }
    } else if (c == '}' || c == ']') {
      --depth;
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      const size_t end = std::min(text.find_first_not_of("+-.0123456789eE", i), text.size());
      refuse_too_long(text.substr(i, end - i));
      i = end - 1;
    }
  }
  return Json::parse(text.begin(), text.end());
}

}  // namespace lockstep::rl

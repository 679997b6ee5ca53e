#include "checkpoint/format/directory/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace lockstep::checkpoint {
namespace {

constexpr std::string_view kDecimal = "0123456789", kHexadecimal = "0123456789abcdef";
constexpr size_t kRandomDigits = 16;

// Both remove what the text begins with: `prefix`, if it is there; all that are of `digits`, and
// say how many these were.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}
size_t take_digits(std::string_view& text, std::string_view digits) {
  const size_t count = std::min(text.find_first_not_of(digits), text.size());
  text.remove_prefix(count);
  return count;
}

}  // namespace

bool is_leftover(std::string_view name) {
  if (!take(name, kTemporary)) return false;
  if (name == kLatestName) return true;
  if (!take(name, kStep) || take_digits(name, kDecimal) == 0) return false;
  if (take(name, ".") && take_digits(name, kDecimal) == 0) return false;
  if (take(name, "-") && take_digits(name, kHexadecimal) != kRandomDigits) return false;
  return name.empty();
}

std::string_view exported_name(std::string_view name) {
  if (!take(name, kTemporary) || take_digits(name, kHexadecimal) != kRandomDigits) return {};
  return take(name, "-") ? name : std::string_view();
}

std::string random_digits() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

}  // namespace lockstep::checkpoint

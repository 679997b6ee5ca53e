#include "parallel/layout/flat_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

// A name may hold any byte but these two.
std::string escaped(std::string_view name) {
  std::string text;
  for (const char c : name) {
    if (c == '%' || c == ' ' || c == '\n') {
      text += fmt::format("%{:02x}", static_cast<unsigned char>(c));
    } else {
      text += c;
    }
  }
  return text;
}

// The words of a layout's text, one after another.
class Words {
 public:
  explicit Words(std::string_view text) : text_(text), rest_(text) {}

  bool empty() const { return rest_.empty(); }
  std::string_view word() {
    const size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view found = rest_.substr(0, end);
    if (found.empty()) refuse();
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    return found;
  }
  int64_t number(int64_t least) {
    const std::string_view digits = word();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), value);
    if (error != std::errc() || end != digits.end() || value < least) refuse();
    return value;
  }
  std::string name() {
    const std::string_view quoted = word();
    std::string text;
    for (size_t i = 0; i < quoted.size(); ++i) {
      if (quoted[i] != '%') {
        text += quoted[i];
        continue;
      }
      unsigned value = 0;
      const auto digits = quoted.substr(i + 1, 2);
      const auto [end, error] = std::from_chars(digits.begin(), digits.end(), value, 16);
      if (digits.size() != 2 || error != std::errc() || end != digits.end()) refuse();
      text += static_cast<char>(value);
      i += 2;
    }
    return text;
  }
  [[noreturn]] void refuse() const {
    throw ConfigError(fmt::format("[flat layout] '{}' is no layout's text", text_));
  }

 private:
  std::string_view text_, rest_;
};

}  // namespace

FlatLayout::FlatLayout(at::ScalarType dtype, int64_t alignment)
    : dtype_(dtype), width_(static_cast<int64_t>(c10::elementSize(dtype))), alignment_(alignment) {
  if (alignment_ < width_ || alignment_ % width_ != 0) {
    throw ConfigError(
        fmt::format("[flat layout] an alignment of {} bytes for elements of {}: it must be a "
                    "multiple of that",
                    alignment_, width_));
  }
}

FlatLayout FlatLayout::packed(at::ScalarType dtype) {
  return {dtype, static_cast<int64_t>(c10::elementSize(dtype))};
}

size_t FlatLayout::add(std::string name, int64_t numel) {
  members_.push_back({.name = std::move(name), .numel = numel, .begin = numel_});
  const int64_t bytes = (numel * width_ + alignment_ - 1) / alignment_ * alignment_;
  numel_ += bytes / width_;
  return members_.size() - 1;
}

std::vector<int64_t> FlatLayout::cuts(int64_t parts, int64_t grid) const {
  std::vector<int64_t> cuts;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t wanted = Shard{part, parts}.of(numel_).begin;
    int64_t cut = 0;
    for (const auto& member : members_) {
      if (member.begin > wanted) break;
      cut = member.begin + std::min((wanted - member.begin) / grid * grid, member.numel);
    }
    cuts.push_back(cut);
  }
  cuts.push_back(numel_);
  return cuts;
}

std::vector<FlatLayout::Portion> FlatLayout::portions(const Range& range) const {
  std::vector<Portion> found;
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& [name, numel, begin] = members_[i];
    const Range inside{std::max(range.begin, begin) - begin,
                       std::min(range.end, begin + numel) - begin};
    if (inside.begin < inside.end) found.push_back({i, inside});
  }
  return found;
}

std::string FlatLayout::text() const {
  std::string text = fmt::format("{} {}", static_cast<int>(dtype_), alignment_);
  for (const auto& member : members_) {
    text += fmt::format(" {} {}", escaped(member.name), member.numel);
  }
  return text;
}

FlatLayout FlatLayout::parse(std::string_view text) {
  Words words(text);
  const int64_t dtype = words.number(0);
  if (dtype >= static_cast<int64_t>(at::ScalarType::Undefined)) words.refuse();
  FlatLayout layout(static_cast<at::ScalarType>(dtype), words.number(1));
  while (!words.empty()) {
    std::string name = words.name();
    layout.add(std::move(name), words.number(0));
  }
  return layout;
}

}  // namespace lockstep::parallel

#include "train/config/value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>

#include "core/words.h"

namespace lockstep::train {
namespace {

constexpr size_t kMostShown = 40;
constexpr size_t kMostItems = 1000;

bool is_quoted(const YAML::Node& node) { return node.Tag() == "!"; }

bool parse(const YAML::Node& node, bool& value) {
  if (is_quoted(node)) return false;
  const std::string word = lower_case(node.Scalar());
  value = word == "true" || word == "yes" || word == "on";
  return value || word == "false" || word == "no" || word == "off";
}

// 1_000_000, as YAML 1.1 and Python write it. Underscores stand between digits.
std::string without_underscores(const std::string& text) {
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&text](size_t at) {
      return at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0;
    };
    if (text[i] == '_' && i > 0 && is_digit(i - 1) && is_digit(i + 1)) continue;
    digits += text[i];
  }
  if (digits.size() > 1 && digits[0] == '+' && digits[1] != '-') digits.erase(0, 1);
  return digits;
}

bool parse(const YAML::Node& node, double& value) {
  if (is_quoted(node)) return false;
  const std::string digits = without_underscores(node.Scalar());
  const char* end = digits.data() + digits.size();
  const auto [stop, status] = std::from_chars(digits.data(), end, value);
  return status == std::errc() && stop == end && std::isfinite(value);
}

bool parse(const YAML::Node& node, int64_t& value) {
  if (is_quoted(node)) return false;
  const std::string digits = without_underscores(node.Scalar());
  const char* end = digits.data() + digits.size();
  const auto [stop, status] = std::from_chars(digits.data(), end, value);
  if (status == std::errc() && stop == end) return true;
  // 1e6 is a whole number, too.
  double number = 0;
  constexpr double kExact = 9007199254740992.0;  // above it doubles have gaps
  if (!parse(node, number) || std::abs(number) > kExact || number != std::floor(number)) {
    return false;
  }
  value = static_cast<int64_t>(number);
  return true;
}

// A whole number for which there is no room.
bool is_beyond_int64(const YAML::Node& node) {
  if (!node.IsScalar() || is_quoted(node)) return false;
  const std::string digits = without_underscores(node.Scalar());
  int64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, status] = std::from_chars(digits.data(), end, value);
  return status == std::errc::result_out_of_range && stop == end;
}

bool parse(const YAML::Node& node, std::string& value) {
  value = node.Scalar();
  return value.find('\0') == value.npos;
}

template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;

std::string text_of_item(bool value) { return value ? "true" : "false"; }
std::string text_of_item(int64_t value) { return std::to_string(value); }
std::string text_of_item(double value) { return text_of_number(value); }
std::string text_of_item(const std::string& value) { return quoted(value); }

// Whether YAML, or we, would take the bare text for something else.
bool is_plain(const std::string& text) {
  if (text.empty() || text.size() > 200) return false;
  const std::string word = lower_case(text);
  for (const char* other : {"null", "~", "true", "false", "yes", "no", "on", "off", "y", "n"}) {
    if (word == other) return false;
  }
  const auto is_safe = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '/' || c == '.' || c == '-' || c == '+';
  };
  return std::all_of(text.begin(), text.end(), is_safe) && text[0] != '-' && text != "...";
}

}  // namespace

std::string type_of(const Value& example) {
  struct Words {
    std::string operator()(bool) const { return "true or false"; }
    std::string operator()(int64_t) const { return "a whole number"; }
    std::string operator()(double) const { return "a number"; }
    std::string operator()(const std::string&) const { return "a text"; }
    std::string operator()(const std::vector<int64_t>&) const { return "a list of whole numbers"; }
    std::string operator()(const std::vector<double>&) const { return "a list of numbers"; }
    std::string operator()(const std::vector<std::string>&) const { return "a list of texts"; }
  };
  return std::visit(Words(), example);
}

bool read_value(const YAML::Node& node, const Value& example, Value& value, std::string& error) {
  const auto read = [&](const auto& like) {
    using T = std::decay_t<decltype(like)>;
    T result = {};
    if constexpr (kIsList<T>) {
      const auto add = [&](const YAML::Node& item) {
        typename T::value_type one = {};
        if (!item.IsScalar() || !parse(item, one)) return false;
        result.push_back(std::move(one));
        return true;
      };
      bool good = node.IsScalar() ? add(node) : node.IsSequence() && node.size() <= kMostItems;
      for (size_t i = 0; good && node.IsSequence() && i < node.size(); ++i) good = add(node[i]);
      if (!good) return false;
    } else if (!node.IsScalar() || !parse(node, result)) {
      return false;
    }
    value = std::move(result);
    return true;
  };
  if (std::visit(read, example)) return true;
  error = fmt::format("{} is not {}", excerpt(node), type_of(example));
  if (std::holds_alternative<int64_t>(example) && is_beyond_int64(node)) {
    error += fmt::format(" of 64 bits, up to {}", std::numeric_limits<int64_t>::max());
  }
  if (node.IsScalar() && node.Tag() == "!" &&
      std::visit(
          [&](auto like) {
            if constexpr (kIsList<decltype(like)>) {
              return false;
            } else {
              return parse(YAML::Node(node.Scalar()), like);
            }
          },
          example)) {
    error += ", because of its quotes: write it without";
  }
  return false;
}

std::string text_of_number(double number) {
  // fmt's shortest form; 1.0 stays a number with a point.
  std::string text = fmt::format("{}", number);
  return text;
}

std::string quoted(const std::string& text) {
  if (is_plain(text)) return text;
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::string text_of(const Value& value) {
  return std::visit(
      [](const auto& held) -> std::string {
        using T = std::decay_t<decltype(held)>;
        if constexpr (kIsList<T>) {
          std::string list;
          for (const auto& item : held) list += (list.empty() ? "" : ", ") + text_of_item(item);
          return "[" + list + "]";
        } else {
          return text_of_item(held);
        }
      },
      value);
}

std::string excerpt(const YAML::Node& node) {
  if (node.IsMap()) return "a group of keys";
  if (node.IsSequence()) {
    return fmt::format("a list of {} {}", node.size(), node.size() == 1 ? "item" : "items");
  }
  if (!node.IsScalar()) return "nothing";
  std::string text = node.Scalar();
  if (text.size() > kMostShown) text = text.substr(0, kMostShown) + "...";
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return fmt::format("'{}'", text);
}

}  // namespace lockstep::train

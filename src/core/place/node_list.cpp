#include "core/place/node_list.h"

#include <fmt/format.h>

#include "core/number.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr size_t kMostNames = 65'536;
constexpr int kMostTasks = 1 << 20;

// Reads `text` from left to right.
class Reader {
 public:
  Reader(std::string_view text, const char* what) : text_(text), what_(what) {}

  bool at_end() const { return at_ == text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  bool take(char c) {
    if (peek() != c || at_end()) return false;
    ++at_;
    return true;
  }
  // Everything up to one of `stops`, or the end.
  std::string_view until(std::string_view stops) {
    const size_t end = std::min(text_.find_first_of(stops, at_), text_.size());
    const std::string_view found = text_.substr(at_, end - at_);
    at_ = end;
    return found;
  }
  std::string_view digits() {
    const size_t begin = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    if (at_ == begin) fail("expected a number");
    if (at_ - begin > 9) fail("a number of more than 9 digits");
    return text_.substr(begin, at_ - begin);
  }
  int number() { return *whole_number_from<int>(digits()); }
  [[noreturn]] void fail(std::string_view reason) const {
    throw ConfigError(fmt::format("[environment] {} '{}': {} at character {}", what_,
                                  text_.substr(0, 200), reason, at_ + 1));
  }

 private:
  std::string_view text_;
  const char* what_;
  size_t at_ = 0;
};

void check_count(const Reader& reader, size_t count) {
  if (count > kMostNames) reader.fail(fmt::format("more than {} names", kMostNames));
}

// What a bracket holds: "1-3,5", or "01-03".
std::vector<std::string> bracket(Reader& reader) {
  std::vector<std::string> values;
  do {
    const std::string_view low = reader.digits();
    const size_t width = low.size();
    const int first = *whole_number_from<int>(low);
    const int last = reader.take('-') ? reader.number() : first;
    if (last < first) reader.fail("a range that counts down");
    check_count(reader, values.size() + static_cast<size_t>(last - first) + 1);
    for (int value = first; value <= last; ++value) {
      values.push_back(fmt::format("{:0{}}", value, width));
    }
  } while (reader.take(','));
  if (!reader.take(']')) reader.fail("expected ']'");
  return values;
}

}  // namespace

std::vector<std::string> expand_node_list(std::string_view list) {
  Reader reader(list, "node list");
  std::vector<std::string> names;
  do {
    std::vector<std::string> of_entry = {std::string(reader.until(",[]"))};
    bool after_bracket = false;
    while (reader.take('[')) {
      std::vector<std::string> longer;
      const std::vector<std::string> values = bracket(reader);
      check_count(reader, of_entry.size() * values.size());
      const std::string_view between = reader.until(",[]");
      for (const std::string& name : of_entry) {
        for (const std::string& value : values) {
          longer.push_back(fmt::format("{}{}{}", name, value, between));
        }
      }
      of_entry = std::move(longer);
      after_bracket = !between.empty();
    }
    if (after_bracket) reader.fail("text after the last bracket");
    if (of_entry.front().empty()) reader.fail("expected a name");
    check_count(reader, names.size() + of_entry.size());
    names.insert(names.end(), of_entry.begin(), of_entry.end());
  } while (reader.take(','));
  if (!reader.at_end()) reader.fail("expected ',' or the end");
  return names;
}

std::vector<int> expand_task_counts(std::string_view counts) {
  Reader reader(counts, "task counts");
  std::vector<int> expanded;
  do {
    const int tasks = reader.number();
    if (tasks > kMostTasks) reader.fail(fmt::format("more than {} tasks", kMostTasks));
    int times = 1;
    if (reader.take('(')) {
      if (!reader.take('x')) reader.fail("expected 'x'");
      times = reader.number();
      if (!reader.take(')')) reader.fail("expected ')'");
    }
    check_count(reader, expanded.size() + static_cast<size_t>(times));
    expanded.insert(expanded.end(), static_cast<size_t>(times), tasks);
  } while (reader.take(','));
  if (!reader.at_end()) reader.fail("expected ',' or the end");
  return expanded;
}

}  // namespace lockstep

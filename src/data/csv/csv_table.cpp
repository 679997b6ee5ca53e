#include "data/csv/csv_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <optional>
#include <unordered_map>

#include "core/nearest.h"
#include "core/number.h"
#include "data/csv/csv_records.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::data {
namespace {

constexpr size_t kShownText = 40;

std::string shown(std::string_view text) {
  std::string all(text.substr(0, kShownText));
  for (char& c : all) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';
  }
  return text.size() > kShownText ? all + "..." : all;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// The number that is all of `text`; nothing when it is none.
std::optional<double> number_in(std::string_view text) {
  if (text.starts_with('+')) {
    text.remove_prefix(1);
    if (text.starts_with('-')) return std::nullopt;
  }
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size()) return std::nullopt;
  if (code == std::errc()) return value;
  // Too large for float64, or too small, which is 0 or next to it.
  if (code == std::errc::result_out_of_range) return number_from(std::string(text));
  return std::nullopt;
}

template <class T>
Array<T> allocate(int64_t count) {
  const size_t bytes = std::max<size_t>(1, static_cast<size_t>(count) * sizeof(T));
  Array<T> memory(static_cast<T*>(std::malloc(bytes)));
  if (!memory) throw std::bad_alloc();
  return memory;
}

class TableParser {
 public:
  TableParser(std::string_view bytes, const std::string& name, const CsvFormat& format)
      : bytes_(bytes),
        name_(name),
        format_(format),
        numbers_may_be_missing_(std::any_of(format.missing.begin(), format.missing.end(),
                                            [](const std::string& text) {
                                              const auto number = number_in(text);
                                              return number && !std::isnan(*number);
                                            })),
        records_(bytes, format.delimiter) {}

  CsvTable parse() {
    if (bytes_.starts_with("\xFF\xFE") || bytes_.starts_with("\xFE\xFF")) {
      fail("is a text in UTF-16, as spreadsheets save \"Unicode text\": save it as CSV in UTF-8");
    }
    bool has_record = records_.next();
    if (!has_record) fail("has no records, only blank lines");
    if (!records_.fault().empty()) fail_here(std::string(records_.fault()));
    for (size_t i = 0; i < records_.fields().size(); ++i) {
      names_.push_back(format_.header ? std::string(trimmed(records_.fields()[i]))
                                      : std::to_string(i));
      if (records_.fields()[i].find('\r') != std::string_view::npos &&
          bytes_.find('\n') == std::string_view::npos) {
        fail(std::string(kCrAlone));
      }
    }
    choose_columns();
    reserve();
    if (format_.header) warn_of_numbers();
    if (format_.header) has_record = records_.next();
    for (; has_record; has_record = records_.next()) {
      if (!read_row()) {
        ++table_.skipped;
      } else {
        note_line();
        ++table_.rows;
      }
    }
    if (table_.rows == 0) {
      fail(table_.skipped == 0 ? "has a header and no rows"
                               : fmt::format("has no usable row: {} are bad, the first is {}",
                                             table_.skipped, table_.first_skipped));
    }
    if (format_.classification) number_classes();
    return std::move(table_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(fmt::format("[csv] {}: {}", name_, what));
  }
  [[noreturn]] void fail_here(const std::string& what) const {
    throw DataError(fmt::format("[csv] {}:{}: {}", name_, records_.line(), what));
  }

  size_t column_of(const std::string& wanted) const {
    const auto matches = std::count(names_.begin(), names_.end(), wanted);
    if (matches == 1) {
      return static_cast<size_t>(std::find(names_.begin(), names_.end(), wanted) - names_.begin());
    }
    if (matches > 1) {
      fail(fmt::format("{} columns are called '{}': choose by number, from 0", matches, wanted));
    }
    const auto number = whole_number_from<int64_t>(wanted);
    if (number && *number >= 0 && *number < std::ssize(names_)) {
      return static_cast<size_t>(*number);
    }
    const std::string meant = nearest(wanted, names_);
    fail(fmt::format("has no column '{}': there are {}, from '{}' to '{}'{}{}", wanted,
                     names_.size(), shown(names_.front()), shown(names_.back()),
                     meant.empty() ? "." : fmt::format("; did you mean '{}'?", shown(meant)),
                     delimiter_advice()));
  }

  // For a file whose only column is a whole line.
  std::string delimiter_advice() const {
    if (names_.size() > 1) return "";
    for (const char other : {';', '\t', ',', '|'}) {
      if (other != format_.delimiter && names_[0].find(other) != std::string::npos) {
        return fmt::format(" The fields may be separated by '{}': give it as the delimiter",
                           other == '\t' ? std::string("\\t") : std::string(1, other));
      }
    }
    return "";
  }

  void choose_columns() {
    roles_.assign(names_.size(), Role::None);
    if (format_.targets.empty()) {
      targets_ = {names_.size() - 1};
    } else {
      for (const auto& name : format_.targets) targets_.push_back(column_of(name));
    }
    if (format_.classification && targets_.size() != 1) {
      throw ConfigError(fmt::format("[csv] {}: classification needs one target column, not {}",
                                    name_, targets_.size()));
    }
    for (const size_t column : targets_) claim(column, Role::Target);
    if (format_.features.empty()) {
      for (size_t i = 0; i < names_.size(); ++i) {
        if (roles_[i] == Role::None) features_.push_back(i);
      }
      if (features_.empty()) {
        fail(fmt::format("has no column beside the target '{}'.{}", shown(names_[targets_[0]]),
                         delimiter_advice()));
      }
    } else {
      for (const auto& name : format_.features) features_.push_back(column_of(name));
    }
    for (const size_t column : features_) claim(column, Role::Feature);
    for (const size_t column : features_) table_.feature_names.push_back(names_[column]);
    for (const size_t column : targets_) table_.target_names.push_back(names_[column]);
    for (size_t i = 0; i < format_.classes.size(); ++i) {
      class_numbers_.emplace(format_.classes[i], static_cast<int64_t>(i));
    }
  }

  enum class Role { None, Feature, Target };
  void claim(size_t column, Role role) {
    if (roles_[column] != Role::None) {
      throw ConfigError(
          fmt::format("[csv] {}: column '{}' is chosen twice", name_, shown(names_[column])));
    }
    roles_[column] = role;
  }

  // A record of k fields has at least k bytes, but for the last one, so cells are no more than
  // bytes.
  void reserve() {
    const auto lines = std::count(bytes_.begin(), bytes_.end(), '\n') + 1;
    const auto fields = static_cast<int64_t>(names_.size());
    const int64_t most = std::min<int64_t>(lines, static_cast<int64_t>(bytes_.size()) / fields + 1);
    table_.features = allocate<float>(most * std::ssize(features_));
    if (format_.classification) {
      table_.classes = allocate<int64_t>(most);
    } else {
      table_.targets = allocate<float>(most * std::ssize(targets_));
    }
  }

  // Whether the record was read; throws, or says no, when it is bad.
  bool read_row() {
    if (records_.is_unclosed()) fail_here(std::string(records_.fault()));
    if (!records_.fault().empty()) return bad(std::string(records_.fault()));
    const auto& fields = records_.fields();
    if (fields.size() != names_.size()) {
      return bad(fmt::format("has {} fields, and the {} has {}", fields.size(),
                             format_.header ? "header" : "first record", names_.size()));
    }
    float* features = table_.features.get() + table_.rows * std::ssize(features_);
    for (const size_t column : features_) {
      if (!read_number(column, *features++, format_.missing_is_nan)) return false;
    }
    if (format_.classification) return read_class(fields[targets_[0]]);
    float* targets = table_.targets.get() + table_.rows * std::ssize(targets_);
    for (const size_t column : targets_) {
      if (!read_number(column, *targets++, false)) return false;
    }
    return true;
  }

  bool is_missing(std::string_view text) const {
    return text.empty() ||
           std::find(format_.missing.begin(), format_.missing.end(), text) != format_.missing.end();
  }

  bool read_number(size_t column, float& to, bool missing_is_nan) {
    const std::string_view text = trimmed(records_.fields()[column]);
    // Most values are numbers, which few lists of missing texts have: those cost no search.
    const bool is_gap = numbers_may_be_missing_ && is_missing(text);
    if (const auto value = number_in(text); !is_gap && value && !std::isnan(*value)) {
      to = static_cast<float>(*value);
      if (std::isfinite(to)) return true;
      return bad_value(column, std::isinf(*value) ? "is infinite" : "is beyond float32");
    }
    if (is_gap || is_missing(text)) {
      if (!missing_is_nan) return bad_value(column, "is missing");
      to = std::numeric_limits<float>::quiet_NaN();
      return true;
    }
    if (text == "true" || text == "True" || text == "TRUE") return to = 1, true;
    if (text == "false" || text == "False" || text == "FALSE") return to = 0, true;
    return bad_value(column,
                     "is not a number (texts may be classes: `classification`; columns are chosen "
                     "by `features` and `targets`)");
  }

  bool read_class(std::string_view field) {
    const std::string_view text = trimmed(field);
    if (is_missing(text)) return bad_value(targets_[0], "is missing");
    key_.assign(text);
    auto found = class_numbers_.find(key_);
    if (found == class_numbers_.end()) {
      if (!format_.classes.empty()) return bad_value(targets_[0], "is not a known class");
      found = class_numbers_.emplace(key_, std::ssize(class_numbers_)).first;
    }
    table_.classes[static_cast<size_t>(table_.rows)] = found->second;
    return true;
  }

  // A header of the numbers 0, 1, 2 is usual; one of fractions is a row.
  void warn_of_numbers() const {
    const auto is_number = [](const std::string& name) { return number_in(name).has_value(); };
    const auto is_whole = [](const std::string& name) {
      return whole_number_from<int64_t>(name).has_value();
    };
    if (!std::ranges::all_of(names_, is_number) || std::ranges::all_of(names_, is_whole)) return;
    log::warn(
        fmt::format("[csv] {}: the first line is taken for the columns' names, and all of "
                    "them are numbers: if it is a row, say header: false",
                    name_));
  }

  bool bad_value(size_t column, std::string_view what) {
    return bad(fmt::format("column '{}' ({}): '{}' {}", shown(names_[column]), column,
                           shown(records_.fields()[column]), what));
  }

  bool bad(const std::string& what) {
    if (!format_.skip_bad) fail_here(what);
    if (table_.skipped == 0) {
      table_.first_skipped = fmt::format("{}:{}: {}", name_, records_.line(), what);
    }
    return false;
  }

  void note_line() {
    const auto& lines = table_.lines;
    const int64_t expected =
        lines.empty() ? -1 : lines.back().second + table_.rows - lines.back().first;
    if (records_.line() != expected) table_.lines.emplace_back(table_.rows, records_.line());
  }

  // Classes were numbered as they came.
  void number_classes() {
    std::vector<std::string> texts(class_numbers_.size());
    for (const auto& [text, number] : class_numbers_) texts[static_cast<size_t>(number)] = text;
    if (!format_.classes.empty()) {
      table_.class_names = format_.classes;
      table_.class_count = std::ssize(format_.classes);
      return;
    }
    std::vector<int64_t> values;
    for (const auto& text : texts) {
      const auto value = whole_number_from<int64_t>(text);
      if (!value) break;
      values.push_back(*value);
    }
    std::vector<int64_t> numbers(texts.size());
    const bool whole = values.size() == texts.size();
    if (whole && *std::min_element(values.begin(), values.end()) >= 0) {
      numbers = values;
      table_.class_count = *std::max_element(values.begin(), values.end());
      if (table_.class_count < std::numeric_limits<int64_t>::max()) ++table_.class_count;
    } else {
      std::vector<size_t> order(texts.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return whole ? values[a] < values[b] : texts[a] < texts[b];
      });
      for (size_t i = 0; i < order.size(); ++i) {
        numbers[order[i]] = static_cast<int64_t>(i);
        table_.class_names.push_back(texts[order[i]]);
      }
      table_.class_count = std::ssize(texts);
    }
    for (int64_t i = 0; i < table_.rows; ++i) {
      auto& number = table_.classes[static_cast<size_t>(i)];
      number = numbers[static_cast<size_t>(number)];
    }
  }

  std::string_view bytes_;
  const std::string& name_;
  const CsvFormat& format_;
  const bool numbers_may_be_missing_;  // the texts of missing values have one, such as -999
  CsvRecords records_;
  std::vector<std::string> names_;
  std::vector<Role> roles_;
  std::vector<size_t> features_, targets_;
  std::unordered_map<std::string, int64_t> class_numbers_;
  std::string key_;
  CsvTable table_;
};

}  // namespace

CsvTable parse_csv(std::string_view bytes, const std::string& name, const CsvFormat& format) {
  for (const char bad : {'"', '\n', '\r', '\0'}) {
    if (format.delimiter == bad) {
      throw ConfigError(
          fmt::format("[csv] {}: the delimiter cannot be a quote, a line end or NUL", name));
    }
  }
  if (!format.classes.empty() && !format.classification) {
    throw ConfigError(fmt::format("[csv] {}: classes are given without classification", name));
  }
  for (size_t i = 0; i < format.classes.size(); ++i) {
    const auto end = format.classes.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(format.classes.begin(), end, *end) == end) continue;
    throw ConfigError(fmt::format("[csv] {}: the class '{}' is given twice", name, *end));
  }
  return TableParser(bytes, name, format).parse();
}

}  // namespace lockstep::data

#include "data/csv/csv_records.h"

#include <algorithm>

namespace lockstep::data {

CsvRecords::CsvRecords(std::string_view bytes, char delimiter)
    : bytes_(bytes), delimiter_(delimiter) {
  if (bytes_.starts_with("\xEF\xBB\xBF")) position_ = 3;
}

bool CsvRecords::at_line_end() const {
  if (at_end() || bytes_[position_] == '\n') return true;
  return bytes_[position_] == '\r' &&
         (position_ + 1 == bytes_.size() || bytes_[position_ + 1] == '\n');
}

bool CsvRecords::next() {
  if (unclosed_) return false;
  while (!at_end()) {
    line_ = next_line_;
    read_record();
    if (fields_.size() != 1 || !fields_[0].empty() || !fault_.empty()) return true;
  }
  return false;
}

void CsvRecords::read_record() {
  fields_.clear();
  unescaped_.clear();
  fault_ = {};
  while (true) {
    if (!at_end() && bytes_[position_] == '"') {
      read_quoted();
    } else {
      read_plain();
    }
    if (at_end() || bytes_[position_] != delimiter_) break;
    ++position_;
  }
  if (!at_end() && bytes_[position_] == '\r') ++position_;
  if (at_end()) return;
  ++position_;
  ++next_line_;
}

void CsvRecords::read_plain() {
  const size_t begin = position_;
  while (!at_end() && bytes_[position_] != delimiter_ && bytes_[position_] != '\n') ++position_;
  if ((at_end() || bytes_[position_] == '\n') && position_ > begin &&
      bytes_[position_ - 1] == '\r') {
    --position_;
  }
  fields_.push_back(bytes_.substr(begin, position_ - begin));
}

void CsvRecords::read_quoted() {
  const size_t begin = ++position_;
  bool doubled = false;
  while (true) {
    const size_t quote = bytes_.find('"', position_);
    if (quote == std::string_view::npos) {
      fault_ = "a quote that is never closed";
      unclosed_ = true;
      position_ = bytes_.size();
      fields_.push_back(bytes_.substr(begin));
      return;
    }
    position_ = quote + 1;
    if (at_end() || bytes_[position_] != '"') break;
    doubled = true;
    ++position_;
  }
  const std::string_view inner = bytes_.substr(begin, position_ - 1 - begin);
  next_line_ += std::count(inner.begin(), inner.end(), '\n');
  if (doubled) {
    std::string& text = unescaped_.emplace_back();
    for (size_t i = 0; i < inner.size(); ++i) {
      text += inner[i];
      if (inner[i] == '"') ++i;
    }
    fields_.emplace_back(text);
  } else {
    fields_.push_back(inner);
  }
  if (at_line_end() || bytes_[position_] == delimiter_) return;
  // A '\r' here is not followed by a '\n'.
  fault_ = bytes_[position_] == '\r' ? kCrAlone : "text after a closing quote";
  while (!at_line_end() && bytes_[position_] != delimiter_) ++position_;
}

}  // namespace lockstep::data

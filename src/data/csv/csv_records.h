// The records of a CSV file (RFC 4180). Free of torch.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

inline constexpr std::string_view kCrAlone =
    "its lines end with CR alone, like those of old Macs: they have to end with LF or CRLF";

// Fields are separated by the delimiter, records by LF or CRLF; a field in quotes may hold both,
// and a quote as two. Blank lines are not records. A byte-order mark of UTF-8 is left out.
class CsvRecords {
 public:
  CsvRecords(std::string_view bytes, char delimiter);

  // Goes to the next record; false when there is none.
  bool next();

  // Of the record, until the next one.
  const std::vector<std::string_view>& fields() const { return fields_; }
  // The line where it begins, from 1.
  int64_t line() const { return line_; }
  // What is wrong with its quotes; empty: nothing.
  std::string_view fault() const { return fault_; }
  // A quote that is never closed: there is no telling where the next record begins.
  bool is_unclosed() const { return unclosed_; }

 private:
  void read_record();
  void read_quoted();
  void read_plain();
  bool at_end() const { return position_ == bytes_.size(); }
  bool at_line_end() const;

  std::string_view bytes_;
  char delimiter_;
  size_t position_ = 0;
  int64_t next_line_ = 1;
  int64_t line_ = 0;
  std::vector<std::string_view> fields_;
  std::deque<std::string> unescaped_;  // fields that had doubled quotes
  std::string_view fault_;
  bool unclosed_ = false;
};

}  // namespace lockstep::data

// The file of a run's log.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/files/fd.h"
#include "lockstep/train/run_log.h"

namespace lockstep::train {

// Appends records as RunLog says, in whichever thread take() is called.
class LogFile {
 public:
  // Makes the folder, too. Throws Error when the file cannot be opened.
  explicit LogFile(std::string path);

  // `missing`: this many records before it were not taken.
  void take(const LogRecord& record, double unix_seconds, uint64_t missing);

 private:
  bool write_all(std::string_view bytes);
  bool write_line(const std::string& line);
  void warn();

  std::string path_;
  Fd file_;
  uint64_t missing_ = 0;    // lines since the last one that was written
  bool ends_whole_ = true;  // with a line feed
  bool has_warned_ = false;
};

}  // namespace lockstep::train

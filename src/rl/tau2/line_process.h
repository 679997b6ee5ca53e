// A process that answers lines with lines.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/files/fd.h"

namespace lockstep::rl {

class LineProcess {
 public:
  // Throws EnvironmentError when there is no such program.
  explicit LineProcess(const std::vector<std::string>& command);
  // Kills it.
  ~LineProcess();
  LineProcess(const LineProcess&) = delete;
  LineProcess& operator=(const LineProcess&) = delete;

  // Sends a line and returns the next one it writes, both without their ends. Throws
  // EnvironmentError when it ends, writes more than 16 MiB in a line, or takes longer.
  std::string exchange(const std::string& line, std::chrono::milliseconds timeout);

  // The end of what it wrote to stderr.
  std::string last_words() const;

  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  Fd socket_;
  Fd errors_;
  std::string received_;
};

}  // namespace lockstep::rl

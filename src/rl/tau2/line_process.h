// A process that answers lines with lines.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/files/fd.h"
#include "core/process/own_process.h"

namespace lockstep::rl {

class LineProcess {
 public:
  // Throws EnvironmentError when there is no such program.
  explicit LineProcess(const std::vector<std::string>& command);
  // Kills it, but in no child by fork(), which has only a copy.
  ~LineProcess();
  LineProcess(const LineProcess&) = delete;
  LineProcess& operator=(const LineProcess&) = delete;

  // Sends a line and returns the next one it writes, both without their ends. Throws
  // EnvironmentError when it ends, writes more than 16 MiB in a line, or takes longer.
  std::string exchange(const std::string& line, std::chrono::milliseconds timeout);

  // The end of what it wrote to stderr, of which a process that writes much there keeps the latest.
  std::string last_words() const;

  pid_t pid() const { return pid_; }
  // False in a child by fork(), whose lines would be taken for its parent's.
  bool is_own() const { return process_.is_here(); }

 private:
  void forget_words() const;

  const OwnProcess process_;
  pid_t pid_ = -1;
  Fd socket_;
  Fd errors_;
  std::string received_;
};

}  // namespace lockstep::rl

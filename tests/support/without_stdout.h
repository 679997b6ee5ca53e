// A process that was started without a stdout, as daemons start some.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>

namespace lockstep::test {

class WithoutStdout {
 public:
  WithoutStdout() {
    std::fflush(stdout);
    kept_ = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    close(STDOUT_FILENO);
  }
  ~WithoutStdout() {
    std::fflush(stdout);
    dup2(kept_, STDOUT_FILENO);
    close(kept_);
  }
  WithoutStdout(const WithoutStdout&) = delete;
  WithoutStdout& operator=(const WithoutStdout&) = delete;

 private:
  int kept_ = -1;
};

}  // namespace lockstep::test

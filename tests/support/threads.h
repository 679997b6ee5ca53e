// How many threads there are, and may be.
#pragma once

#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <thread>

namespace lockstep::test {

// Of this process. GNU's OpenMP keeps those that a thread has computed with until that thread ends,
// so the growth over a thread's first kernel, and one, is with how many it computed.
inline int64_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// Of this process, which may have no further one.
inline void forbid_threads() {
  rlimit most{};
  ASSERT_EQ(getrlimit(RLIMIT_NPROC, &most), 0);
  most.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NPROC, &most), 0);
  // Root has no such limit. This thread alone is another user's, and its files are still root's.
  if (geteuid() == 0) {
    ASSERT_EQ(syscall(SYS_setresuid, 65534, 65534, 0), 0);
    setfsuid(0);
  }
  ASSERT_THROW(std::thread([] {}).join(), std::system_error);
}

}  // namespace lockstep::test

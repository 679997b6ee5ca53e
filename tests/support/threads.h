// How many threads there are.
#pragma once

#include <cstdint>
#include <filesystem>
#include <iterator>

namespace lockstep::test {

// Of this process. GNU's OpenMP keeps those that a thread has computed with until that thread ends,
// so the growth over a thread's first kernel, and one, is with how many it computed.
inline int64_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

}  // namespace lockstep::test

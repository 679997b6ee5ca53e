// Work on memory that is there, divided among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/thread.h"

namespace lockstep::checkpoint {

// body(i) for each i of [0, count), begun in this order by up to `threads` threads, of which the
// calling one is the first. Throws what the first body that failed threw; what was not begun by
// then is left out. Threads of its own, since those of OpenMP wait for each other in a loop that
// takes the cores from whoever is late.
template <class Body>
void in_threads(int64_t count, int threads, const Body& body) {
  std::atomic<int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (...) {
        next = count;
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min<int64_t>(threads, count); ++i) {
      others.push_back(thread_without_signals(work));
    }
  } catch (const std::system_error&) {
    // Those that there are do it.
  }
  work();
  for (auto& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace lockstep::checkpoint

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

#include "core/process/thread.h"
#include "lockstep/core/shard.h"

namespace lockstep::checkpoint {

// body(i) for each i of [0, count), by up to `threads` threads, of which the calling one is the
// first. Each begins with a stretch of its own, from its beginning, and then helps the others:
// neighbours in a file that two threads read by turns took 0.41 s from the disk and 0.082 from the
// page cache where stretches took 0.28 and 0.050 (docs/log/2026-11.md). Throws what the first body
// that failed threw; what was not begun by then is left out. Threads of its own, since those of
// OpenMP spin while they wait, on cores that the slower threads need.
template <class Body>
void in_threads(int64_t count, int threads, const Body& body) {
  struct Stretch {
    std::atomic<int64_t> next = 0;
    int64_t end = 0;
  };
  const auto workers =
      static_cast<int>(std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1)));
  std::vector<Stretch> stretches(workers);
  for (int i = 0; i < workers; ++i) {
    const Range range = Shard{i, workers}.of(count);
    stretches[i].next = range.begin;
    stretches[i].end = range.end;
  }
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&](int own) {
    for (int turn = 0; turn < workers; ++turn) {
      Stretch& stretch = stretches[(own + turn) % workers];
      for (int64_t i = stretch.next++; i < stretch.end && !failed; i = stretch.next++) {
        try {
          body(i);
        } catch (...) {
          failed = true;
          const std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      }
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < workers; ++i) {
      others.push_back(thread_without_signals([&work, i] { work(i); }));
    }
  } catch (const std::system_error&) {
    // Those that there are do it.
  }
  work(0);
  for (auto& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace lockstep::checkpoint

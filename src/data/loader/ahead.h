// Things made ahead of their reader by threads. Free of torch, so that ThreadSanitizer can watch
// all of it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/process/own_process.h"
#include "core/process/thread.h"
#include "lockstep/core/error.h"

namespace lockstep::data {

struct AheadPlan {
  int64_t count = 0;    // how many there are
  int64_t depth = 1;    // how many of them are made before the reader asks
  int64_t threads = 1;  // how many are made at once
};

template <typename Thing>
class Ahead {
 public:
  // Makes thing `number`, perhaps in the memory of an earlier one; the threads call it at once.
  using Make = std::function<Thing(int64_t number, std::optional<Thing> spare)>;

  // Starts the threads; throws std::system_error when there cannot be that many.
  Ahead(Make make, AheadPlan plan)
      : make_(std::move(make)), plan_(plan), made_(static_cast<size_t>(plan.depth)) {
    const int64_t useful = std::min({plan.threads, plan.depth, plan.count});
    try {
      for (int64_t i = 0; i < useful; ++i) {
        threads_.push_back(thread_without_signals([this] { run(); }));
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  // Waits for those being made.
  ~Ahead() { stop(); }
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  // Thing 0, 1, ... in turn, whichever thread made it; to be called at most plan.count times.
  // Rethrows what making it threw: again when it is called again. `spare` serves for a later one.
  // Throws ConfigError in a child by fork(), which has none of the threads.
  Thing next(std::optional<Thing> spare) {
    if (!process_.is_here()) {
      throw ConfigError("[loader] " + process_.refusal("loop over this epoch") +
                        "; begin an epoch in the child");
    }
    std::unique_lock lock(mutex_);
    if (spare) spares_.push_back(std::move(*spare));
    auto& place = place_of(taken_);
    is_made_.wait(lock, [&] { return place.thing || place.error; });
    if (place.error) std::rethrow_exception(place.error);
    Thing thing = std::move(*std::exchange(place.thing, std::nullopt));
    ++taken_;
    lock.unlock();
    has_room_.notify_one();
    return thing;
  }

 private:
  struct Place {
    std::optional<Thing> thing;
    std::exception_ptr error;
  };

  Place& place_of(int64_t number) { return made_[static_cast<size_t>(number % plan_.depth)]; }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    has_room_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  // What this thread is to make; nothing when there is nothing more to do.
  std::optional<int64_t> next_number(std::optional<Thing>& spare) {
    std::unique_lock lock(mutex_);
    has_room_.wait(lock, [this] {
      return stopped_ || started_ == plan_.count || started_ < taken_ + plan_.depth;
    });
    if (stopped_ || started_ == plan_.count) return std::nullopt;
    if (!spares_.empty()) {
      spare = std::move(spares_.back());
      spares_.pop_back();
    }
    return started_++;
  }

  void run() {
    while (true) {
      std::optional<Thing> spare;
      const auto number = next_number(spare);
      if (!number) break;
      Place made;
      try {
        made.thing = make_(*number, std::move(spare));
      } catch (...) {
        made.error = std::current_exception();
      }
      const std::lock_guard lock(mutex_);
      // The reader gets no further than this error: what comes after it need not be made.
      if (made.error) stopped_ = true;
      place_of(*number) = std::move(made);
      is_made_.notify_one();
    }
    has_room_.notify_all();  // the others may be waiting for room that is no longer made
  }

  const Make make_;
  const AheadPlan plan_;
  const OwnProcess process_;
  std::mutex mutex_;
  std::condition_variable is_made_, has_room_;
  std::vector<Place> made_;  // number n is at n % depth
  std::vector<Thing> spares_;
  int64_t started_ = 0;
  int64_t taken_ = 0;
  bool stopped_ = false;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace lockstep::data

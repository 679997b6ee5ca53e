// Batches made ahead by a thread of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "data/batch_maker.h"

namespace lockstep::data {

class Prefetcher {
 public:
  // Starts making maker's batches in order, at most `depth` >= 1 ahead.
  Prefetcher(BatchMaker maker, int64_t depth);
  // Waits for the batch being made; drops the others.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The next batch; to be called at most count() times. Rethrows what making it threw. `spare` goes
  // to a later one.
  Batch next(Batch spare);

 private:
  struct Made {
    Batch batch;
    std::exception_ptr error;
  };
  void run();
  // Waits until there is room; false when the reader has gone.
  bool wait_for_room(Batch& spare);
  Made make(int64_t number, Batch spare);

  BatchMaker maker_;
  const size_t depth_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Made> made_;
  std::vector<Batch> spares_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace lockstep::data

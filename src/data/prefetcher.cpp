#include "data/prefetcher.h"

#include <utility>

namespace lockstep::data {

Prefetcher::Prefetcher(BatchMaker maker, int64_t depth)
    : maker_(std::move(maker)), depth_(static_cast<size_t>(depth)), thread_([this] { run(); }) {}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Batch Prefetcher::next(Batch spare) {
  Made made;
  {
    std::unique_lock lock(mutex_);
    if (spare.data.defined()) spares_.push_back(std::move(spare));
    changed_.wait(lock, [this] { return !made_.empty(); });
    made = std::move(made_.front());
    made_.pop_front();
  }
  changed_.notify_all();
  if (made.error) std::rethrow_exception(made.error);
  return std::move(made.batch);
}

bool Prefetcher::wait_for_room(Batch& spare) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stop_ || made_.size() < depth_; });
  if (!spares_.empty()) {
    spare = std::move(spares_.back());
    spares_.pop_back();
  }
  return !stop_;
}

Prefetcher::Made Prefetcher::make(int64_t number, Batch spare) {
  try {
    return {maker_.make(number, std::move(spare)), nullptr};
  } catch (...) {
    return {{}, std::current_exception()};
  }
}

void Prefetcher::run() {
  for (int64_t number = 0; number < maker_.count(); ++number) {
    Batch spare;
    if (!wait_for_room(spare)) return;
    Made made = make(number, std::move(spare));
    const bool failed = made.error != nullptr;
    {
      const std::lock_guard lock(mutex_);
      made_.push_back(std::move(made));
    }
    changed_.notify_all();
    if (failed) return;
  }
}

}  // namespace lockstep::data

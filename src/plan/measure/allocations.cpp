#include "plan/measure/allocations.h"

#include <algorithm>

namespace lockstep::plan {

void Allocations::reportMemoryUsage(void* place, int64_t bytes, size_t /*allocated*/,
                                    size_t /*reserved*/, c10::Device /*device*/) {
  const std::lock_guard lock(mutex_);
  if (bytes > 0) {
    sizes_[place] = bytes;
    now_ += static_cast<double>(bytes);
    peak_ = std::max(peak_, now_);
    window_ = std::max(window_, now_);
  } else if (const auto found = sizes_.find(place); found != sizes_.end()) {
    now_ -= static_cast<double>(found->second);
    sizes_.erase(found);
  }
}

double Allocations::now() const {
  const std::lock_guard lock(mutex_);
  return now_;
}

double Allocations::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

void Allocations::begin_window() {
  const std::lock_guard lock(mutex_);
  window_ = now_;
}

double Allocations::window_peak() const {
  const std::lock_guard lock(mutex_);
  return window_;
}

}  // namespace lockstep::plan

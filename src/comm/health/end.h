// Why a group has ended: any thread may set it, the first reason counts.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace lockstep::comm {

class End {
 public:
  // False when there was a reason before.
  bool say(std::string why) {
    const std::lock_guard lock(mutex_);
    if (why_) return false;
    why_ = std::move(why);
    is_said_.store(true, std::memory_order_release);
    return true;
  }
  // Replaces the reason by a more detailed one.
  void explain(std::string why) {
    const std::lock_guard lock(mutex_);
    why_ = std::move(why);
  }
  bool is_said() const { return is_said_.load(std::memory_order_acquire); }
  std::optional<std::string> why() const {
    if (!is_said()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    return why_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_said_ = false;
  std::optional<std::string> why_;
};

}  // namespace lockstep::comm

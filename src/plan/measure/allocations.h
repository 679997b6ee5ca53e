// How much memory libtorch's CPU allocator has given out, at any moment of a pass.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace lockstep::plan {

// Is notified of the allocations of the thread that has made a Watch, and of the threads that work
// for it. What was allocated before is not counted, nor when it is freed.
class Allocations : public c10::MemoryReportingInfoBase {
 public:
  // For as long as it lives, this thread's are counted.
  class [[nodiscard]] Watch {
   public:
    explicit Watch(const std::shared_ptr<Allocations>& all)
        : guard_(c10::DebugInfoKind::PROFILER_STATE, all) {}

   private:
    c10::DebugInfoGuard guard_;
  };

  void reportMemoryUsage(void* place, int64_t bytes, size_t allocated, size_t reserved,
                         c10::Device device) override;
  bool memoryProfilingEnabled() const override { return true; }

  // Bytes that are alive, and the most that ever were.
  double now() const;
  double peak() const;
  // The most since the last call of begin_window().
  void begin_window();
  double window_peak() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<void*, int64_t> sizes_;
  double now_ = 0, peak_ = 0, window_ = 0;
};

}  // namespace lockstep::plan

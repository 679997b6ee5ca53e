// How much memory tensors on the CPU take.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>

namespace lockstep::test {

// While one lives, this process's tensors are counted: only where no other thread makes any, and in
// a process of its own, since what it has allocated may live on.
class CountedMemory final : public c10::Allocator {
 public:
  CountedMemory() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 0xff); }
  ~CountedMemory() override { c10::SetCPUAllocator(before_, 0xff); }
  CountedMemory(const CountedMemory&) = delete;
  CountedMemory& operator=(const CountedMemory&) = delete;

  int64_t now() const { return counts().now; }
  int64_t peak() const { return counts().peak; }
  void forget_peak() { counts().peak = counts().now; }

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{before_->allocate(bytes), static_cast<int64_t>(bytes)};
    counts().now += block->bytes;
    counts().peak = std::max(counts().peak, counts().now);
    return {block->memory.get(), block, &release, block->memory.device()};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Block {
    c10::DataPtr memory;
    int64_t bytes;
  };
  struct Counts {
    int64_t now = 0, peak = 0;
  };
  // Blocks may outlive the object.
  static Counts& counts() {
    static Counts all;
    return all;
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    counts().now -= block->bytes;
    delete block;
  }

  c10::Allocator* before_;
};

}  // namespace lockstep::test

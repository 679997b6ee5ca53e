// What one rank's part of the flight recorder's memory holds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/flight/segment.h"

namespace lockstep::flight {

constexpr uint32_t kFrames = 40;
constexpr uint32_t kModules = 8;

// What a signal handler of the rank writes: no pointers, no memory but this.
struct Trace {
  std::atomic<uint32_t> listens;  // 1: this library's handler for question() is installed
  std::atomic<uint32_t> told;     // how many stacks were written; raised when one is complete
  std::atomic<uint32_t> writing;  // 1 while a thread writes, and after the rank's end
  std::atomic<int32_t> process;   // the rank's, 0 until it has come
  int32_t signal;
  uint32_t frames;
  uint64_t at_ns;
  uint64_t offset[kFrames];
  uint8_t module[kFrames];
  char modules[kModules][248];
};

// The rank alone writes it. A reader in the middle of a write may see half of an operation, which
// has no worse effect than a wrong word in a report.
struct Block {
  static constexpr uint64_t kMagic = 0x3330'746c'666b'636c;  // "lckflt03"

  uint64_t magic;
  std::atomic<uint32_t> calls;
  std::atomic<uint32_t> blocked_in;
  std::atomic<uint64_t> blocked_since_ns;
  struct Busy {
    std::atomic<uint64_t> total_ns;
    std::atomic<uint64_t> since_ns;  // 0 when it is not busy so
  } busy[2];
  std::atomic<uint32_t> failed;  // 0, or a Blame: the two below are valid
  uint64_t failed_at_ns;
  char failure[1000];
  Trace trace;
  Operation ring[kOperations];     // call n is in ring[n % kOperations]
  std::atomic<uint32_t> compared;  // how often; odd while the two below are written
  uint64_t compared_at_ns;
  char comparison[200];
};

// Installs the handlers that write this process's stack into `block`.
void watch_stack(Block& block) noexcept;
// Writes the last stack, at the end of the process: nothing replaces it. For std::terminate()'s
// handler, with the address that it returns to.
void tell_last_stack(Block& block, const void* handler_called_at) noexcept;

constexpr size_t kBlockBytes = 8192;  // whole pages: each rank maps its own
static_assert(sizeof(Block) <= kBlockBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free, "it is shared between processes");

}  // namespace lockstep::flight

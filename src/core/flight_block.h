// What one rank's part of the flight recorder's memory holds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lockstep/core/flight.h"

namespace lockstep::flight {

// The rank alone writes it. A reader in the middle of a write may see half of an operation, which
// is no more than a wrong word in a report.
struct Block {
  static constexpr uint64_t kMagic = 0x3130'746c'666b'636c;  // "lckflt01"

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
  Operation ring[kOperations];  // call n is in ring[n % kOperations]
};

constexpr size_t kBlockBytes = 8192;  // whole pages: each rank maps its own
static_assert(sizeof(Block) <= kBlockBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free, "it is shared between processes");

}  // namespace lockstep::flight

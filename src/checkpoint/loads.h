// How often tensors of a program have taken values that all ranks take: of checkpoints and other
// files, or of one rank, from which a Ddp gives them to all.
#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep::checkpoint {

// Where several ranks have one memory, it is then written to by all, and holds what it should.
inline std::atomic<uint64_t>& loads() {
  static std::atomic<uint64_t> count = 0;
  return count;
}

}  // namespace lockstep::checkpoint

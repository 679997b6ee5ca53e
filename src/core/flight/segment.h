// The flight recorder's side of the launcher: what each rank of a host did last, in memory that is
// read while the rank runs and after it has ended.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/flight/record.h"

namespace lockstep::flight {

struct Comparison {
  uint64_t at_ns = 0;
  std::string text;
};

struct Failure {
  uint64_t at_ns = 0;
  Blame blame = Blame::Own;
  std::string text;
};

// An address in a program or library: `offset` as in the symbol table of the file.
struct Frame {
  std::string module;
  uint64_t offset = 0;
};

struct Stack {
  uint64_t at_ns = 0;
  int signal = 0;             // that it died of; 0 when it was asked
  std::vector<Frame> frames;  // from the innermost; of a deep one the middle is left out
};

struct Log {
  uint32_t calls = 0;           // announced so far
  std::vector<Operation> last;  // the last of them, oldest first, at most kOperations
  uint32_t blocked_in = 0;      // the number of the call it waits in; 0 for none
  uint64_t blocked_since_ns = 0;
  std::array<uint64_t, 2> busy_ns{};  // by Activity, up to now
  std::optional<Failure> failure;
  std::optional<Comparison> comparison;  // the last
  std::optional<Stack> stack;            // the last that it has written

  // "in all_reduce sum #412 (bucket 3, float32 x 8), for 0.31 s", or "in no collective; the last
  // was broadcast #411 (float32 x 8), 1.20 s before", at `now_ns`; empty when it has called none.
  std::string where(uint64_t now_ns) const;
};

struct Block;

// Memory for the ranks of a host. Each maps its own part alone. What is read from it has been
// written by the ranks and is checked.
class Segment {
 public:
  // The descriptor is close-on-exec and belongs to the object. Throws Error.
  explicit Segment(int local_ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int fd() const { return fd_; }
  Log read(int local_rank) const;
  // Whether the rank handles question().
  bool listens(int local_rank) const;
  // The process that is the rank, by its own account; 0 before it has come.
  pid_t process(int local_rank) const;
  // How many stacks the rank has written.
  uint32_t stacks_told(int local_rank) const;

 private:
  const Block& block(int local_rank) const;

  int ranks_;
  int fd_ = -1;
  void* memory_ = nullptr;
};

}  // namespace lockstep::flight

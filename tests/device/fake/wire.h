// What the processes of a fake NCCL communicator share: a stream of bytes from each rank to each
// other, in a file of memory that the unique id names.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::test::fake {

// A message on its way; mismatched ones wait for ever, as NCCL's do.
struct Move {
  bool sends = false;
  int peer = 0;
  char* data = nullptr;
  uint64_t bytes = 0;
  uint64_t kind = 0;  // must be alike on both sides
  uint64_t moved = 0;
  bool opened = false;  // the header went over
};

class FakeWire {
 public:
  FakeWire(const std::string& name, int rank, int size);
  ~FakeWire();

  bool all_here() const;
  // Runs all moves at the same time; false when `aborted` ended it.
  bool run(std::vector<Move> moves, const std::atomic<bool>& aborted);
  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  static constexpr uint64_t kRing = 1 << 18;
  struct Ring {
    std::atomic<uint64_t> written, read;
    char data[kRing];
  };
  // Followed by the rings.
  struct alignas(64) File {
    std::atomic<int> joined;
  };
  Ring& ring(int from, int to) const {
    return reinterpret_cast<Ring*>(file_ + 1)[from * size_ + to];
  }
  uint64_t put(Ring& ring, const char* data, uint64_t bytes);
  uint64_t take(Ring& ring, char* data, uint64_t bytes);
  bool advance(Move& move);

  const int rank_, size_;
  uint64_t length_ = 0;
  File* file_ = nullptr;
};

}  // namespace lockstep::test::fake

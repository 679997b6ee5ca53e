#include "device/fake/wire.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace lockstep::test::fake {
namespace {

struct Header {
  uint64_t bytes, kind;
};

}  // namespace

FakeWire::FakeWire(const std::string& name, int rank, int size)
    : rank_(rank), size_(size), length_(sizeof(File) + sizeof(Ring) * size * size) {
  const std::string path = "/lockstep-fake-nccl-" + name;
  const int fd = shm_open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(length_)) != 0) return;
  file_ = static_cast<File*>(mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  if (++file_->joined == size) shm_unlink(path.c_str());
}

FakeWire::~FakeWire() { munmap(file_, length_); }

bool FakeWire::all_here() const { return file_->joined == size_; }

uint64_t FakeWire::put(Ring& ring, const char* data, uint64_t bytes) {
  const uint64_t at = ring.written, room = kRing - (at - ring.read);
  const uint64_t step = std::min({bytes, room, kRing - at % kRing});
  std::memcpy(ring.data + at % kRing, data, step);
  ring.written = at + step;
  return step;
}

uint64_t FakeWire::take(Ring& ring, char* data, uint64_t bytes) {
  const uint64_t at = ring.read;
  const uint64_t step = std::min({bytes, ring.written - at, kRing - at % kRing});
  std::memcpy(data, ring.data + at % kRing, step);
  ring.read = at + step;
  return step;
}

// True when it moved something.
bool FakeWire::advance(Move& move) {
  Ring& way = move.sends ? ring(rank_, move.peer) : ring(move.peer, rank_);
  static_assert(kRing % sizeof(Header) == 0);
  if (!move.opened) {
    Header header{move.bytes, move.kind};
    if (move.sends) {
      if (kRing - (way.written - way.read) < 2 * sizeof header) return false;
      for (uint64_t done = 0; done < sizeof header;)
        done += put(way, reinterpret_cast<char*>(&header) + done, sizeof header - done);
    } else {
      if (way.written - way.read < sizeof header) return false;
      Header seen{};
      for (uint64_t done = 0; done < sizeof seen; ++done) {
        reinterpret_cast<char*>(&seen)[done] = way.data[(way.read + done) % kRing];
      }
      if (seen.bytes != header.bytes || seen.kind != header.kind) return false;
      way.read += sizeof header;
    }
    move.opened = true;
    return true;
  }
  char* data = move.data + move.moved;
  const uint64_t left = move.bytes - move.moved;
  const uint64_t step = move.sends ? put(way, data, left) : take(way, data, left);
  move.moved += step;
  return step > 0;
}

bool FakeWire::run(std::vector<Move> moves, const std::atomic<bool>& aborted) {
  const auto is_over = [](const Move& move) { return move.opened && move.moved == move.bytes; };
  while (!std::all_of(moves.begin(), moves.end(), is_over)) {
    if (aborted) return false;
    bool moved = false;
    for (size_t i = 0; i < moves.size(); ++i) {
      // Messages between the same two in their order.
      const bool first = std::none_of(moves.begin(), moves.begin() + i, [&](const Move& before) {
        return !is_over(before) && before.peer == moves[i].peer && before.sends == moves[i].sends;
      });
      if (first && !is_over(moves[i])) moved = advance(moves[i]) || moved;
    }
    if (!moved) sched_yield();
  }
  return true;
}

}  // namespace lockstep::test::fake

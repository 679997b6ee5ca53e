// Memory that the processes of one host share: an anonymous file, which is gone with the last
// process that maps it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/shm/door.h"
#include "core/files/fd.h"

namespace lockstep::comm {

// How another process of this host finds and identifies a segment while its creator holds it open.
struct SegmentHandle {
  int64_t bytes = -1;  // -1: there is none
  uint64_t device = 0, inode = 0;
  Cookie cookie{};     // what its descriptor comes with
  char path[64] = {};  // where it has a name instead
};

class Segment {
 public:
  Segment() = default;

  // A zeroed segment of `bytes`, handed to the processes with these doors (see door.h); where one
  // of them is out of reach, it has a name until close_handle(). Throws CommError that says how
  // much is needed and how much there is.
  static Segment create(int64_t bytes, const std::vector<std::string>& doors);
  // Maps what another process created for this one, and nothing else. Throws CommError.
  static Segment attach(const SegmentHandle& handle);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* data() const { return data_; }
  int64_t size() const { return bytes_; }

  // Where others find it; valid on the creator until close_handle(), which is called once all have
  // attached: from then on no name, descriptor or file refers to the memory.
  const SegmentHandle& handle() const { return handle_; }
  void close_handle();

  // Gives [offset, offset + bytes) its pages now, huge ones where the system has them, so that a
  // full machine is an error here and not a SIGBUS in the middle of training. Throws CommError.
  void populate(int64_t offset, int64_t bytes) const;
  // Gives the pages of [offset, offset + bytes) back to the system, for all who map them.
  void discard(int64_t offset, int64_t bytes) const noexcept;

 private:
  static Segment map(int fd, int64_t bytes);
  static Segment sized(Fd fd, int64_t bytes);

  char* data_ = nullptr;
  int64_t bytes_ = 0;
  Fd fd_;
  SegmentHandle handle_;
};

// Rounds up to pages, or to huge pages when it is large enough for those to pay.
int64_t page_rounded(int64_t bytes);

}  // namespace lockstep::comm

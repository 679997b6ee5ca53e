// Memory that the processes of one host share: an anonymous file, which is gone with the last process that maps it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace lockstep::comm {

// How another process of this host finds a segment while its creator holds it open.
struct SegmentHandle {
  pid_t pid = 0;  // 0: there is none
  int fd = -1;
  int64_t bytes = 0;
};

class Segment {
 public:
  Segment() = default;

  // A zeroed segment of `bytes`. Throws CommError that says how much is needed and how much there is.
  static Segment create(int64_t bytes);
  // Maps what another process created. Throws CommError.
  static Segment attach(const SegmentHandle& handle);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* data() const { return data_; }
  int64_t size() const { return bytes_; }

  // Where others find it; valid on the creator until close_handle(), which is called once all have attached: from then on
  // no name, descriptor or file refers to the memory.
  SegmentHandle handle() const;
  void close_handle();

  // Gives [offset, offset + bytes) its pages now, huge ones where the system has them, so that a full machine is an
  // error here and not a SIGBUS in the middle of training. Throws CommError.
  void populate(int64_t offset, int64_t bytes) const;
  // Gives the pages of [offset, offset + bytes) back to the system, for all who map them.
  void discard(int64_t offset, int64_t bytes) const noexcept;

 private:
  static Segment map(int fd, int64_t bytes);

  char* data_ = nullptr;
  int64_t bytes_ = 0;
  int fd_ = -1;
};

// Rounds up to pages, or to huge pages when it is large enough for those to pay.
int64_t page_rounded(int64_t bytes);

}  // namespace lockstep::comm

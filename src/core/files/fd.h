// An owned file descriptor.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace lockstep {

class [[nodiscard]] Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  // No longer this object's.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// What to do about an error of memfd_create() or ftruncate(), to put behind it; mostly nothing.
inline const char* advice_on_limit(int error) {
  if (error == EFBIG) return "; raise `ulimit -f`";
  if (error == EMFILE || error == ENFILE) return "; no descriptor is left: raise `ulimit -n`";
  return "";
}

}  // namespace lockstep

#include "launch/sink.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

namespace lockstep::launch {

Sink::Sink(int fd) : original_(fd), terminal_(isatty(fd) == 1) {
  struct stat status;
  if (fstat(fd, &status) != 0) return;
  socket_ = S_ISSOCK(status.st_mode);
  // O_NONBLOCK on the descriptor itself would also change it for the shell and everybody else who
  // shares it; a second opening of the same pipe or terminal is ours alone. Where that is not
  // allowed, a write may wait for the reader.
  if (S_ISFIFO(status.st_mode) || terminal_) {
    const std::string path = fmt::format("/proc/self/fd/{}", fd);
    opened_ = Fd(open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  }
}

void Sink::flush() {
  while (has_pending()) {
    const char* data = pending_.data() + written_;
    const size_t size = std::min(pending_.size() - written_, kAtOnce);
    const ssize_t sent = socket_ ? send(original_, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
                                 : write(fd(), data, size);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) {
      abandoned_ = abandoned_ || errno == EPIPE || errno == ECONNRESET || errno == EIO;
      lost_bytes_ += static_cast<int64_t>(pending_.size() - written_);
      pending_.clear();
      written_ = 0;
      break;
    }
    written_ += static_cast<size_t>(sent);
  }
  if (!has_pending() || written_ >= kFull) {
    pending_.erase(0, written_);
    written_ = 0;
  }
}

bool is_same_file(int a, int b) {
  struct stat one, other;
  return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_dev == other.st_dev &&
         one.st_ino == other.st_ino;
}

}  // namespace lockstep::launch

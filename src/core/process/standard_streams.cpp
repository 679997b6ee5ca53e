#include "core/process/standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace lockstep {

void open_standard_streams() noexcept {
  const int before = errno;
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    const int opened = open("/dev/null", O_RDWR);  // the lowest free number: fd
    if (opened < 0) break;
    if (opened != fd) close(opened);  // another thread was faster
  }
  errno = before;
}

}  // namespace lockstep

#include "comm/processes.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace lockstep::comm {

Processes::Processes(const std::vector<int>& pids) {
  for (size_t rank = 0; rank < pids.size(); ++rank) {
    if (pids[rank] == 0 || pids[rank] == getpid()) continue;
    const auto fd = static_cast<int>(syscall(SYS_pidfd_open, pids[rank], 0));
    // Anything but an end (a kernel without pidfds) leaves the process unwatched.
    if (fd >= 0 || errno == ESRCH) processes_.push_back({static_cast<int>(rank), fd});
  }
}

Processes::~Processes() {
  for (const Process& process : processes_) {
    if (process.fd >= 0) close(process.fd);
  }
}

std::optional<int> Processes::lost(std::chrono::milliseconds grace) {
  const auto now = std::chrono::steady_clock::now();
  for (Process& process : processes_) {
    pollfd end{process.fd, POLLIN, 0};
    if (!process.ended && (process.fd < 0 || poll(&end, 1, 0) == 1)) process.ended = now;
    if (process.ended && now - *process.ended >= grace) return process.rank;
  }
  return std::nullopt;
}

}  // namespace lockstep::comm

#include "comm/host/processes.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "core/process/stat.h"

namespace lockstep::comm {

std::shared_ptr<const Process> Process::watch(pid_t pid) {
  static std::mutex mutex;
  static std::map<pid_t, std::weak_ptr<const Process>> known;
  const std::lock_guard lock(mutex);
  auto process = known[pid].lock();
  // Or its number went to another.
  if (!process || process->has_ended()) known[pid] = process = std::make_shared<Process>(pid);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  return process;
}

Process::Process(pid_t pid) : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  if (fd_ >= 0) return;
  gone_ = errno == ESRCH;
  if (gone_) return;
  // An old kernel, a container's filter, or no descriptor left.
  if (const auto stat = process_stat(pid)) start_ = stat->start;
}

Process::~Process() {
  if (fd_ >= 0) close(fd_);
}

bool Process::has_ended() const {
  if (gone_) return true;
  if (fd_ < 0) return has_ended_by_proc();
  pollfd end{fd_, POLLIN, 0};
  return poll(&end, 1, 0) == 1;
}

bool Process::has_ended_by_proc() const {
  if (kill(pid_, 0) != 0 && errno == ESRCH) return true;
  const auto stat = process_stat(pid_);
  if (!stat || !start_) return false;
  return stat->state == 'Z' || stat->state == 'X' || stat->start != *start_;
}

Processes::Processes(const std::vector<int>& pids) {
  for (size_t rank = 0; rank < pids.size(); ++rank) {
    if (pids[rank] == 0 || pids[rank] == getpid()) continue;
    peers_.push_back({static_cast<int>(rank), Process::watch(pids[rank])});
  }
}

std::optional<int> Processes::lost(std::chrono::milliseconds grace) {
  const auto now = std::chrono::steady_clock::now();
  for (Peer& peer : peers_) {
    if (!peer.ended && peer.process->has_ended()) peer.ended = now;
    if (peer.ended && now - *peer.ended >= grace) return peer.rank;
  }
  return std::nullopt;
}

}  // namespace lockstep::comm

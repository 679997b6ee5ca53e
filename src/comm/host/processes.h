// Whether other processes of this host still run.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep::comm {

// One of them.
class Process {
 public:
  // All groups of this process share what it takes to watch another.
  static std::shared_ptr<const Process> watch(pid_t pid);
  explicit Process(pid_t pid);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // Also when it has not been waited for yet.
  bool has_ended() const;
  pid_t pid() const { return pid_; }

 private:
  bool has_ended_by_proc() const;

  const pid_t pid_;
  int fd_ = -1;                    // -1 where the kernel gives none: then /proc is asked
  bool gone_ = false;              // it had ended before it could be watched
  std::optional<uint64_t> start_;  // by /proc; nothing where that does not say
};

using WatchedProcesses = std::vector<std::shared_ptr<const Process>>;

class Processes {
 public:
  // By rank; 0 for those that are not to be watched.
  explicit Processes(const std::vector<int>& pids);

  // The first rank that was seen to have ended `grace` ago or longer.
  std::optional<int> lost(std::chrono::milliseconds grace);

 private:
  struct Peer {
    int rank = 0;
    std::shared_ptr<const Process> process;
    std::optional<std::chrono::steady_clock::time_point> ended = std::nullopt;
  };
  std::vector<Peer> peers_;
};

}  // namespace lockstep::comm

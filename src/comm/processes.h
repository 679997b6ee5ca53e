// Whether other processes of this host still run.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

namespace lockstep::comm {

class Processes {
 public:
  // By rank; 0 for those that are not to be watched.
  explicit Processes(const std::vector<int>& pids);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // The first rank that was seen to have ended `grace` ago or longer.
  std::optional<int> lost(std::chrono::milliseconds grace);

 private:
  struct Process {
    int rank = 0;
    int fd = -1;  // below 0 when it had ended before it could be opened
    std::optional<std::chrono::steady_clock::time_point> ended = std::nullopt;
  };
  std::vector<Process> processes_;
};

}  // namespace lockstep::comm

// trajectories.jsonl: every episode that was played, one a line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/rl/learner.h"
#include "rl/run/plan.h"

namespace lockstep::rl {

// The lines of what a unit has played, in the order of episodes, on rank 0; on the others none. Of
// an evaluation's tasks the first trial, or, where options say so, all. Every rank calls it.
std::vector<std::string> trajectory_lines(const Rollout& rollout, const RolloutPlan& plan,
                                          const Unit& unit, const RunOptions& options,
                                          const comm::Group& group);

// The file, on rank 0. It has whole lines only: of what a full disk takes a part of, nothing is
// left.
class TrajectoryFile {
 public:
  explicit TrajectoryFile(std::string path) : path_(std::move(path)) {}

  // From now on the file has the first `lines` lines. Warns where it has fewer.
  void cut(int64_t lines);
  // After what is there. Lines that cannot be written are lost, which is warned of once.
  void append(const std::vector<std::string>& lines);

  int64_t lines() const { return lines_; }
  int64_t lost() const { return lost_; }

 private:
  std::string path_;
  int64_t lines_ = 0, bytes_ = 0;  // that count
  int64_t lost_ = 0;               // lines, by this process
};

}  // namespace lockstep::rl

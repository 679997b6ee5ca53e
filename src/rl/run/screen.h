// What rank 0 of a run prints.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/rollout.h"
#include "lockstep/train/progress_line.h"

namespace lockstep::rl {

class Screen {
 public:
  using Clock = std::chrono::steady_clock;

  // `is_on`: whether anything is printed. `out` is a terminal or not by `style`. `now`: the time.
  Screen(bool is_on, std::FILE* out, const train::TextStyle& style,
         std::function<Clock::time_point()> now = Clock::now);

  // A line that stays.
  void print(const std::string& line);

  // Whether progress() would print.
  bool is_due() const;
  // How far something is: on a terminal a line that is written over, a few times a second;
  // elsewhere a line a minute.
  void progress(const std::string& line);

  // Whether it is a terminal.
  bool rewrites() const { return style_.rewrites; }

 private:
  bool is_on_;
  std::FILE* out_;
  train::TextStyle style_;
  std::function<Clock::time_point()> now_;
  bool is_open_ = false;  // the cursor stands at the beginning of a line that may be written over
  Clock::time_point next_;
};

// How far this rank is with the episodes of a plan.
class RolloutLine {
 public:
  // `what`: which rollout, for people.
  RolloutLine(Screen& screen, std::string what, const RolloutPlan& plan, const comm::Group& group);

  // RolloutOptions::on_message, of a lane.
  void show(const RolloutProgress& lane);
  // A lane has been played.
  void add(const std::vector<Played>& lane);

 private:
  Screen& screen_;
  std::string what_;
  RolloutProgress before_;  // of this rank's lanes so far
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace lockstep::rl

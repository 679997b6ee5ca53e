// Averages parameters over ranks that train independently between the averages: local SGD.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// Every `period` steps, over `group`.
struct AverageLevel {
  Group group;
  int64_t period = 1;
};

// After each optimizer.step(): averager.step(). With LocalSgd this is post-local SGD; with several
// levels (the ranks of a host every 4 steps, all ranks every 16) it is hierarchical SGD.
class Averager {
 public:
  // `levels` from the smallest group to the largest, each period a multiple of the one before; at a
  // step on which several are due, only the largest of their groups averages. The first `warm_up`
  // steps average nothing. Throws ConfigError for other periods, for an empty list, and for a group
  // with Python ranks. A module that no shared_ptr owns must outlive the last step().
  Averager(const ModuleRef& module, std::vector<AverageLevel> levels, int64_t warm_up = 0);

  // Every rank calls it after every step. True when parameters were averaged: real and complex
  // ones, frozen ones too, each once, that the module has now: on all ranks the same. Parameters of
  // integer dtypes and bool, and buffers, are left alone, as in PyTorch. One all_reduce for each
  // parameter, which it waits for. Throws ConfigError for a group whose Ddp has lanes, and when the
  // module has been destroyed.
  bool step();

  // For a checkpoint.
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }

 private:
  ModuleRef module_;
  std::vector<AverageLevel> levels_;
  int64_t warm_up_;
  int64_t steps_ = 0;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::AverageLevel;
using parallel::Averager;
}  // namespace lockstep

// How long a training step takes: computation, collectives, and how much of these is hidden behind
// it. Needs no torch.
//
// A collective over n ranks takes a latency that grows with the hops of its ring or tree, and the
// bytes of its slowest link; the latencies are those of NCCL's tuner (src/graph/tuning.cc), by
// protocol, of which the fastest counts. After Thakur et al., "Optimization of collective
// communication operations in MPICH", 2005.
#pragma once

#include <cstdint>

#include "lockstep/plan/machine.h"

namespace lockstep::plan {

// Two constants for all models, machines and numbers of ranks (docs/plan.md says how they were
// found and what error they leave).
//
// Computation gets slower while a collective runs beside it, by this share of the collective: both
// use the memory and, on GPUs, the multiprocessors.
inline constexpr double kSlowdownOfOverlap = 0.4;
// The slowest of n nodes is waited for: computation takes this share longer with each doubling.
inline constexpr double kStragglingPerDoubling = 0.016;

// Ranks of a collective, and how many of them are on a node.
struct Ranks {
  int64_t count = 1;
  int64_t per_node = 8;

  // How many nodes they are on, the last one maybe not full.
  int64_t nodes() const { return count <= per_node ? 1 : (count + per_node - 1) / per_node; }
};

// Seconds of one collective of `bytes`, the whole tensor's, which is divided among the ranks by
// all_gather and reduce_scatter. 0 for one rank.
double all_gather_seconds(const Machine& machine, const Ranks& ranks, double bytes);
double reduce_scatter_seconds(const Machine& machine, const Ranks& ranks, double bytes);
double all_reduce_seconds(const Machine& machine, const Ranks& ranks, double bytes);

// What a step consists of. All in seconds.
struct StepWork {
  double computation = 0;   // of one device alone, all micro-batches
  double overlappable = 0;  // of it: beside which collectives can run
  double collectives = 0;   // that run beside it as far as there is room
  // Of both: the last micro-batch's backward, where gradients are sent. Its collectives run beside
  // that computation only, and all others beside the rest.
  double last_overlappable = 0, last_collectives = 0;
  double exposed = 0;  // collectives that nothing runs beside
  double update = 0;   // the optimizer
  int64_t nodes = 1;
};

// Where a step's time goes. All in seconds.
struct StepTime {
  double total = 0;
  double computation = 0;  // without what follows
  double slowdown = 0;     // of computation by collectives beside it
  double straggling = 0;   // waiting for the slowest node
  double waiting = 0;      // for collectives that are not hidden
  double update = 0;

  // What more than one rank costs, as a share of the step.
  double communication_share() const {
    return total > 0 ? (slowdown + straggling + waiting) / total : 0;
  }
};

// The time of a step that consists of that.
StepTime step_time(const StepWork& work);

// The computation that makes step_time() of `work` take `seconds`, for a step that was measured:
// what `work` says of computation and of what is overlappable counts by proportion only.
double computation_of(const StepWork& work, double seconds);

}  // namespace lockstep::plan

// Training when ranks have unequal numbers of batches. After PyTorch's "Join" (Generic Join Context
// Manager), which this does without a collective of its own per step.
#pragma once

#include <functional>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// What the sum of gradients is divided by while some ranks have no batches left.
enum class Divisor {
  World,   // the number of ranks, as before: a late batch weighs as much as an early one
  Active,  // the number of ranks that still have one
};

// What happens to ranks that have batches when others have none left.
enum class Uneven {
  Continue,  // they train on
  Throw,     // backward() on them, and finish() on the others, throws DataError
};

// How steps are counted in which some ranks have no batch.
struct JoinOptions {
  Divisor divisor = Divisor::World;
  Uneven uneven = Uneven::Continue;
};

// Something that communicates once per step, which a rank without a batch has to do, too: Ddp and
// ZeroOptimizer. Join calls it in the order in which it was given the joinables.
class Joinable {
 public:
  virtual ~Joinable() = default;

  // Every rank, before the first step. May communicate, in the same way on all ranks.
  virtual void join(const JoinOptions& options) = 0;
  // Every rank, after the last step, when none has a batch, in the same order: a Ddp averages what
  // ranks have accumulated under hold() since, and ranks that had no batch in the last step take
  // over the state of one that had.
  virtual void leave() = 0;
  // This rank's part of a step for which it has no batch: the same collectives, in the same order
  // and of the same sizes, as on a rank that has one, with values that change no result. When a
  // joinable after the Ddp is called, the gradients are already the averages; state that is the
  // same on all ranks has to change as it does on ranks with a batch. The first joinable returns
  // whether there was a step: false when no rank had a batch. The others are not called then, and
  // their results are ignored.
  virtual bool shadow() = 0;
};

// auto join = Join({ddp}); for each batch {...}; join.finish();
//
// Every rank makes one, runs any number of steps (none, too), and calls finish(), which returns
// when all ranks have. A step is one or more backward() of the Ddp, each of which counts.
// Micro-batches under hold() when a rank runs out are its part of the others' next backward(); when
// no rank has another batch, finish() leaves their average in the gradients and makes no step. A
// gradient that no rank has computed in a step is on a rank without a batch what an earlier step
// has left on the others.
//
// SyncBatchNorm, which communicates in forward(), needs equal numbers of batches: in the first step
// for which a rank has none, forward() and that rank's finish() throw DataError, regardless of
// `uneven`.
class [[nodiscard]] Join {
 public:
  // In the order in which a step uses them; the first is a Ddp, whose group has all ranks of the
  // other Ddps', or a Joinable of the program's own that calls one. Throws ConfigError for an
  // optimizer in its place, for a group that lacks a rank of another's, and for an empty list. They
  // outlive this.
  explicit Join(std::vector<std::reference_wrapper<Joinable>> joinables, JoinOptions options = {});
  // Without finish() (an exception): does not communicate, and the group should not be used
  // further.
  ~Join() = default;
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // `rest_of_step` is what the loop does after backward() in each step, when that communicates or
  // changes more than the parameters: GlobalMean, clipping over a group, GradScaler, the
  // optimizer's step, schedulers, an Averager. It runs after each step of the others that this rank
  // made without a batch, on the averaged gradients, so that all ranks make the same collective
  // calls and optimizers make the same steps on all ranks. What it does may not be among the
  // joinables, too. A step has one backward() outside of hold(). GlobalMean goes with
  // Divisor::World.
  //
  //   const auto rest = [&] { scaler.step(adam); scaler.update(); schedule.step(); };
  //   for (each batch) { adam.zero_grad(); scaler.scale(loss).backward(); rest(); }
  //   join.finish(rest);
  //
  // Makes this rank's part of the other ranks' steps until none has a batch left. Then parameters
  // and buffers (but for Buffers::None) are the same on all ranks; without `rest_of_step`
  // optimizers of ranks that ran out early have made fewer steps, unless it is a ZeroOptimizer that
  // joined. Throws DataError as Uneven::Throw says, and what backward() throws.
  void finish(const std::function<void()>& rest_of_step = nullptr);

 private:
  std::vector<std::reference_wrapper<Joinable>> joinables_;
  JoinOptions options_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::Divisor;
using parallel::Join;
using parallel::JoinOptions;
using parallel::Uneven;
}  // namespace lockstep

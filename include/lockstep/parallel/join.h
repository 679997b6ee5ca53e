// Training when ranks have unequal numbers of batches. After PyTorch's "Join" (Generic Join Context
// Manager), which this does without a collective of its own per step.
#pragma once

#include <functional>
#include <vector>

namespace lockstep::parallel {

// What the sum of gradients is divided by while some ranks have no batches left.
enum class Divisor {
  World,   // the number of ranks, as before: a late batch weighs as much as an early one
  Active,  // the number of ranks that still have one
};

// What becomes of ranks that have batches when others have none left.
enum class Uneven {
  Continue,  // they train on
  Throw,     // backward() on them, and finish() on the others, throws DataError
};

struct JoinOptions {
  Divisor divisor = Divisor::World;
  Uneven uneven = Uneven::Continue;
};

// What communicates once a step, so that a rank without a batch has to take its part: Ddp and
// ZeroOptimizer.
class Joinable {
 public:
  virtual ~Joinable() = default;

  // Called by Join. Every rank, before the first step and after the last.
  virtual void join(const JoinOptions& options) = 0;
  // Ranks that had no batch in the last step take over the state of one that had.
  virtual void leave() = 0;
  // This rank's part of a step for which it has no batch. False when no rank had one: then it was
  // not a step.
  virtual bool shadow() = 0;
};

// auto join = Join({ddp}); for each batch {...}; join.finish();
//
// Every rank makes one, runs any number of steps (none, too), and calls finish(), which returns
// when all ranks have. Buffers averaged by SyncBatchNorm are no part of it: such a model needs
// equal numbers of batches, or Uneven::Throw.
class [[nodiscard]] Join {
 public:
  // In the order in which a step uses them; the first is a Ddp. They outlive this.
  explicit Join(std::vector<std::reference_wrapper<Joinable>> joinables, JoinOptions options = {});
  // Without finish() (an exception): does not communicate, and the group should not be used
  // further.
  ~Join() = default;
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Takes part in the other ranks' steps until none has a batch left. Then parameters and buffers
  // are alike on all ranks; optimizers of ranks that ran out early have made fewer steps, unless it
  // is a ZeroOptimizer that joined. Throws DataError as Uneven::Throw says, and what backward()
  // throws.
  void finish();

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

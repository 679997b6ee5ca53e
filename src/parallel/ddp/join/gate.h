// Join, for models whose layers communicate in forward().
#pragma once

#include <memory>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// A rank that has run out of batches communicates in the others' backward(), but runs no forward().
// So the ranks compare whether all have a batch before the first such layer of each forward that
// ends in a backward(), also one under hold(): data may run out between two micro-batches.
class JoinGate {
 public:
  explicit JoinGate(const Group& group) : group_(group) {}

  // Before a layer communicates. The first time in a forward the ranks communicate; throws
  // DataError, on all of them, when one has no batch.
  void begin_forward();
  void end_forward() { has_begun_ = false; }

  // Before a step for which this rank has no batch. Throws DataError when another has one.
  void shadow() const;

 private:
  int ranks_with_batch(int mine) const;

  Group group_;
  bool has_begun_ = false;
};

// One for all SyncBatchNorm layers of the module, which know it from now on; null when there are
// none. `group` is the Ddp's.
std::shared_ptr<JoinGate> gate_of_layers(const ModuleRef& module, const Group& group);

}  // namespace lockstep::parallel

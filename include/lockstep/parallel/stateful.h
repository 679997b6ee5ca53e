// What Checkpointer::track() saves of this library's training objects
// (lockstep/checkpoint/checkpointer.h).
#pragma once

#include <memory>

#include "lockstep/checkpoint/state.h"
#include "lockstep/comm/group.h"
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/comm_hook.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/weight_average.h"
#include "lockstep/parallel/zero_optimizer.h"

namespace lockstep::parallel {

using checkpoint::Stateful;

// Each rank's part, under the names that the same optimizer without ZeRO has: either restores what
// the other saved, on any number of ranks. Throws ConfigError as for that optimizer, and where its
// class is a Stateful: the state of parts is not what that describes.
std::shared_ptr<Stateful> stateful(ZeroOptimizer& optimizer);

// Each rank's part, under the names that the plain module has: either restores what the other
// saved, with any units, on any number of ranks. An optimizer of fsdp.parameters() is tracked as
// any other; its state has the parameters' names, too. The Fsdp is not kept: when it has been
// destroyed, save() and the restoring functions throw CheckpointError.
std::shared_ptr<Stateful> stateful(Fsdp& fsdp);

// The averages under the names of the weights, as an optimizer's state is: with and without Fsdp,
// on any number of ranks. Of a checkpoint without any, where that is allowed, restart() begins the
// average anew. While the average is applied, saving and restoring fail: the module's weights would
// not be the training's.
std::shared_ptr<Stateful> stateful(WeightAverage& average);

// The same on all ranks.
std::shared_ptr<Stateful> stateful(GradScaler& scaler);
std::shared_ptr<Stateful> stateful(LrScheduler& scheduler);
std::shared_ptr<Stateful> stateful(ReduceLrOnPlateau& scheduler);
std::shared_ptr<Stateful> stateful(Averager& averager);

// What the hook keeps on each rank of Ddp's group: checkpoints.track("hook", stateful(*hook,
// group)). As many ranks as saved it get their own back; on another number of ranks each gets the
// mean of all residuals, so that error feedback corrects the average by the same amount, and rank
// 0's values of the rest (CommHook::is_same_on_all).
std::shared_ptr<Stateful> stateful(CommHook& hook, const Group& group);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::stateful;
}  // namespace lockstep

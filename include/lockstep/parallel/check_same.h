// Whether the ranks still train the same model: finds ranks that have diverged without an error.
#pragma once

#include <torch/optim/optimizer.h>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// Compares parameters, buffers and, where one is given, the optimizer's options (learning rates)
// and state of all ranks, byte by byte, through a hash of each: 8 bytes a rank are sent while all
// is well. Every rank calls it, outside of backward(), when the ranks should be equal: after a
// step, or after loading a checkpoint. Throws ConfigError on all ranks when they are not, with the
// ranks that differ from rank 0 and the first parameter, buffer or state that does. Of a
// ZeroOptimizer, whose state is sharded, it compares the options only. It reads all parameters on
// one thread, 22 GB a second (measured on AVX-512 cores, in memory). DdpOptions::check_same_every
// does it every this many steps. The launcher's failure report shows the last result.
void check_same(const ModuleRef& module, const Group& group);
void check_same(const ModuleRef& module, const torch::optim::Optimizer& optimizer,
                const Group& group);

// The optimizer's state and options become rank 0's on every rank: when one rank alone has loaded
// them. Every rank calls it, with an optimizer of the same class over the same parameters in the
// same groups. For every optimizer that can save() and load(): torch's Adam, AdamW, SGD, RMSprop,
// Adagrad and LBFGS, and FusedAdam, FusedAdamW and FusedSGD. Throws ConfigError on all ranks,
// before anything changed, when classes, groups or shapes differ, and for a ZeroOptimizer, whose
// state is sharded: each rank loads its own part. What save() or load() throws on one rank is
// an error that quotes it on the others, a ConfigError where that is one. Ddp makes parameters and
// buffers rank 0's when it is constructed.
void broadcast_optimizer(torch::optim::Optimizer& optimizer, const Group& group);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::broadcast_optimizer;
using parallel::check_same;
}  // namespace lockstep

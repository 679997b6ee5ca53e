// Models that are larger than one rank's memory are built without it. A constructor that runs under
// DeferredInit gives tensors their sizes, and notes how their values are made:
//
//   auto net = [] {
//     const DeferredInit deferred;
//     return Transformer({.vocabulary = 152'000, .layers = 36, .hidden = 4096});
//   }();
//   Fsdp fsdp(net, world.group(), {.units = units_of<TransformerBlockImpl>(*net)});
//
// Fsdp makes the values unit by unit and keeps this rank's part of them. They have the bits that
// construction without it gives with the same seed, and the default generator is left as that
// leaves it. To load a checkpoint then needs no more memory than training.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "lockstep/checkpoint/module_ref.h"

namespace lockstep::parallel {

// While it lives, what this thread builds on the CPU is deferred: tensors of 4 KiB or more that are
// made from sizes (empty, zeros, ones, full, randn, ...), and what changes one of those in place
// without a second tensor (normal_, uniform_, fill_, mul_ by a number, also on a view such as
// weight[0]). Anything else that needs values of deferred tensors makes them: the result is right,
// and takes its memory. Drawing random numbers takes its time twice, and the memory of one tensor.
class [[nodiscard]] DeferredInit {
 public:
  DeferredInit();

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// Whether the tensor has no memory yet. What reads it throws c10::Error that says so.
bool is_deferred(const at::Tensor& tensor);

// Gives it memory and values; also all views of the memory. Nothing when it has them.
void materialize(const at::Tensor& tensor);
// All of a module's parameters and buffers. Ddp does it, and Fsdp for what it does not shard.
void materialize(const ModuleRef& module);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::DeferredInit;
using parallel::materialize;
}  // namespace lockstep

// Activations that are recomputed instead of kept (Chen et al., "Training deep nets with
// sublinear memory cost", 2016).
//
//   ActivationCheckpointing recompute(net->recomputed(models::Recomputed::Full));
//   at::Tensor loss = lockstep::call(net, ids, targets);    // keeps the blocks' inputs only
//   loss.backward();                                        // computes each block once more
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// While it lives, modules that are called through lockstep::call() keep their tensor arguments
// only; backward runs them again, with the same random numbers and the same Autocast. Gradients are
// the same, to the bit unless the caller uses an argument once more that the module uses several
// times: then those are added in another order. Buffers change as in one run: the second begins
// with what the first began with, and leaves what it finds. They have to change in place: where
// forward() puts another tensor in a buffer's place, a ConfigError names it. Where no gradient is
// needed, modules run as usual.
// A forward may return tensors, or assign them to arguments that it takes by reference (call.h):
// its second run gets the arguments as they were. What the second run would change again is refused
// by a ConfigError that names the module: an argument that was changed in place, and a pointer to
// one or an object of another type that forward() may write to. Other objects are copied, views as
// what they show; what has no such copy, and pointers to what the caller may change or end, are
// refused. Tensors within an object of the caller's own type are shared by its copy, and no
// arguments: they must not change in place, and one with a graph that is used elsewhere, too, stops
// backward by an error: a ConfigError, or libtorch's "backward through the graph a second time"
// where the other use comes later in backward. Results without a history (detached ones) have none
// here, either. What forward() keeps in plain members (a counter, a hidden state, a mask that the
// model sets before the call, buffers of a scripted module that are not the module's own, too) is
// not put back for the second run: let it be an argument or a buffer. To assign to a member that
// register_buffer() returned changes the member alone. ConfigError where the second run returns
// other sizes, dtypes or, on CPUs, clearly other values, and where a parameter was changed in place
// since forward() began. Right under Ddp, and with Fsdp, which gathers the parameters for each of
// both runs. Only a backward() of all parameters works on such a graph: torch::autograd::grad() and
// backward() with inputs throw ConfigError where they ask for a gradient of the module's arguments,
// of what these were computed from, or of a parameter that the module has; create_graph does
// always.
class [[nodiscard]] ActivationCheckpointing {
 public:
  // Keeps the modules. Throws ConfigError for an empty one.
  explicit ActivationCheckpointing(std::vector<std::shared_ptr<torch::nn::Module>> modules);
  ~ActivationCheckpointing();
  ActivationCheckpointing(ActivationCheckpointing&&) noexcept;
  ActivationCheckpointing& operator=(ActivationCheckpointing&&) = delete;

 private:
  class Layer;
  std::vector<std::unique_ptr<Layer>> layers_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::ActivationCheckpointing;
}  // namespace lockstep

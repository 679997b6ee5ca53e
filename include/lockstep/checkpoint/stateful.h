// What Checkpointer::track() makes of an object. Other types: write a function of this name beside
// them.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/standard_scaler.h"
#include "lockstep/data/torch_sampler.h"

namespace lockstep::checkpoint {

// Parameters and buffers by the module's own names; a tensor that has several is stored once.
std::shared_ptr<Stateful> stateful(torch::nn::Module& module);
// As above, for a scripted module, which this keeps.
std::shared_ptr<Stateful> stateful(const torch::jit::Module& module);
// As above, for a shared module, which this does not keep: when it is gone, saving and restoring
// throw CheckpointError with the name. Throws ConfigError for an empty pointer.
std::shared_ptr<Stateful> stateful_module(const std::string& name,
                                          const std::shared_ptr<torch::nn::Module>& module);

// torch::optim's Adam, AdamW, SGD, RMSprop and Adagrad, and what is derived from them: options of
// each group ("group/0/lr"), and the state by parameter ("exp_avg/net/fc.weight"; "exp_avg/0/3"
// where no tracked module has it: group and index). A checkpoint's is looked up under all names
// that a tied parameter has here or there. Of a parameter without any state there Adagrad keeps
// what it has, and the others begin. A ZeroOptimizer is saved as one, by its own function, and
// an optimizer of the program's that is a Stateful, too, as that says. Throws ConfigError for
// another class, and for one that keeps options or, when it is saved, states of a class of its own.
// What a derived class has in members of its own is not saved.
std::shared_ptr<Stateful> stateful(torch::optim::Optimizer& optimizer);

// Where the loop stands.
std::shared_ptr<Stateful> stateful(data::Loader& loader);
std::shared_ptr<Stateful> stateful(data::DistributedSampler& sampler);

// Mean and deviation. One that is not fitted takes those saved, of any number of columns; of one
// that is, a checkpoint without them lacks them: it was made with data that were not scaled.
std::shared_ptr<Stateful> stateful(data::StandardScaler& scaler);

// The loop counts the batches that it has taken of the sampler's epoch, the same on all ranks:
// checkpoints.track("sampler", stateful(sampler, taken)). It sets taken = 0 directly before each
// pass over the data loader, not after it: a save there would repeat the epoch. A count that is too
// large makes save() throw (TorchSampler::state_after). After restoring the data loader's next
// begin() continues after the batches taken, and `taken` is 0.
std::shared_ptr<Stateful> stateful(data::TorchSampler& sampler, int64_t& taken);

// The same on all ranks.
std::shared_ptr<Stateful> stateful(int64_t& value);
std::shared_ptr<Stateful> stateful(double& value);
std::shared_ptr<Stateful> stateful(bool& value);
std::shared_ptr<Stateful> stateful(std::string& value);
std::shared_ptr<Stateful> stateful(at::Tensor& tensor);

// An object of a few numbers: `get` gives them, `set` takes the same back. Before anything is
// restored, `check` throws for saved ones that `set` would refuse.
template <class Get, class Set, class Check = void (*)(const Values&)>
std::shared_ptr<Stateful> stateful_values(
    Get get, Set set, Check check = [](const Values&) {}) {
  struct Numbers : Stateful {
    Numbers(Get g, Set s, Check c) : get_(std::move(g)), set_(std::move(s)), check_(std::move(c)) {}
    State state(const Names&) const override { return {.values = get_()}; }
    State destination(const Saved& saved, const Names& names) override {
      State state = this->state(names);
      if (saved.has_like(state.values)) check_(saved.values);
      return state;
    }
    void restored(const State& state) override { set_(state.values); }
    Get get_;
    Set set_;
    Check check_;
  };
  return std::make_shared<Numbers>(std::move(get), std::move(set), std::move(check));
}

}  // namespace lockstep::checkpoint

namespace lockstep {
using checkpoint::stateful;
}  // namespace lockstep

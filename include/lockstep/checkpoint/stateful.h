// What Checkpointer::track() makes of an object. Other types: write a function of this name beside
// them.
#pragma once

#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/checkpoint/error.h"
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

// Private to the library.
template <class T>
concept OtherNumber = std::same_as<T, float> ||
    (std::integral<T>&& std::same_as<T, std::remove_cv_t<T>> && !std::same_as<T, bool> &&
     !std::same_as<T, int64_t>);

// Private to the library.
template <OtherNumber T>
class TrackedNumber : public Stateful {
 public:
  // `number` must stay where it is, and outlive this.
  explicit TrackedNumber(T& number) : number_(number) {}
  State state(const Names&) const override {
    if (!fits<As>(number_)) refuse(number_, "an int64_t, as which it is saved");
    return {.values = {{"value", static_cast<As>(number_)}}};
  }
  // Whether the variable's own value could be saved is not asked.
  State destination(const Saved& saved, const Names&) override {
    State state{.values = {{"value", As{}}}};
    if (!saved.has_like(state.values)) return state;
    const auto there = value_of<As>(saved.values, "value");
    if (!fits<T>(there)) refuse(there, "the type of the variable that is tracked");
    return state;
  }
  void restored(const State& state) override {
    number_ = static_cast<T>(value_of<As>(state.values, "value"));
  }

 private:
  using As = std::conditional_t<std::integral<T>, int64_t, double>;
  // Of the same range, as std::in_range() takes no char.
  template <class Any>
  using Whole =
      std::conditional_t<std::is_signed_v<Any>, std::make_signed_t<Any>, std::make_unsigned_t<Any>>;

  template <class To, class From>
  static bool fits(From number) {
    if constexpr (std::integral<From>) {
      return std::in_range<Whole<To>>(static_cast<Whole<From>>(number));
    } else {
      return !std::isfinite(number) || std::abs(number) <= std::numeric_limits<To>::max();
    }
  }
  template <class From>
  [[noreturn]] static void refuse(From number, const char* type) {
    throw CheckpointError(c10::str("[checkpoint] ", +number, " does not fit into ", type));
  }

  T& number_;
};

// Other whole numbers (int, size_t, char), saved as an int64_t is, and float, saved as a double: a
// variable may change its type between two runs. Throws CheckpointError where the number does not
// fit: when it is saved, or, before anything is restored, a saved one.
template <OtherNumber T>
std::shared_ptr<Stateful> stateful(T& value) {
  return std::make_shared<TrackedNumber<T>>(value);
}

}  // namespace lockstep::checkpoint

namespace lockstep {
using checkpoint::stateful;
}  // namespace lockstep

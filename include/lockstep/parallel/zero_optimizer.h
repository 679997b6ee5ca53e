// An optimizer whose state and work are sharded over the ranks (ZeRO stage 1: Rajbhandari et al.,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020).
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/join.h"

namespace lockstep::parallel {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// Options of ZeroOptimizer.
struct ZeroOptions {
  // Where all ranks share a memory (the CPUs of one host) there is one copy of the parameters for
  // all of them, and nothing is sent after an update. Then no rank may write to a parameter between
  // two steps but one, between two collectives of all: p.mul_(0.5) on two ranks is p.mul_(0.25).
  // Where several have, as in sharpness-aware minimisation (SAM), the next step() throws, but for
  // what this library writes on all: what is read of checkpoints and other files, and what a Ddp
  // gives all ranks. What a collective or an Averager writes there counts as written by each of its
  // ranks. Writes by data() cannot be seen, because they count no version.
  // WeightAverage::apply() may be called on all, or on some.
  bool share_parameters = false;
};

// Each rank updates a contiguous 1/size() of all parameters' elements with an optimizer of its own,
// which holds the state of those only, and sends them to all.
//
//   ZeroOptimizer adam(net->parameters(), world, zero<FusedAdamW>(AdamWOptions(1e-3)));
//
// It is an Optimizer of the whole parameters and their gradients: GradScaler, clip_grad_norm_ and
// schedulers, libtorch's too, take it as any other. Learning rates and other options are set in its
// param_groups(), in the same way on every rank: what differs is found when the update is sent (of
// libtorch's classes of options). state() is empty, since the state is the parts' (save()): what is
// put there is refused by the next step, and only another ZeroOptimizer begins without a state.
//
// Bits are those of the same optimizer over whole parameters, if it treats every element by itself
// (SGD, Adam, AdamW, RMSprop, Adagrad; not LBFGS, which is refused). Of a class of another origin
// that cannot be known: rank 0 warns of it. Gradients must be the same on all ranks, as Ddp leaves
// them. A parameter that a group lists twice is updated once.
//
// Each rank has parameters of its own, which all ranks may change in the same way between two steps
// (clamp_(), an average over time, loading a checkpoint). If one rank alone
// changes parameters, only the change to its own part survives the next step. When parameters were
// given other memory, as by Module::load() or a swap by set_data(), on all ranks, that step moves
// all of them to new memory. Tensors that have got the old one keep it and its values; with
// share_parameters it stays one for all ranks.
class ZeroOptimizer : public Optimizer, public Joinable {
 public:
  // Makes this rank's optimizer from groups of 1-D leaves, aliases of the parameters' memory; a
  // group may be empty. It takes all groups, and keeps their options. What it throws on one rank is
  // an error that quotes it on the others, a ConfigError where that is one.
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<OptimizerParamGroup>)>;

  // Every rank constructs it with the same parameters, in the same order, and the same values.
  // Throws ConfigError for a parameter that is in two groups; and on all ranks for the first
  // parameter that is another one there (by group, shape, dtype and strides, and by its place in
  // its Ddp or, without one, values in another order), for options that differ, and for one that is
  // not dense, is on another device than the group's, has overlapping or gapped memory, or has
  // memory in common with another. Parameters are tied by one tensor that is registered under
  // several names: two tensors in the same memory, as set_data() makes them, would be taken apart;
  // parts of one buffer that lie side by side do not count as such. References to the parameters
  // stay valid, data pointers do not: construct it before anything that keeps data pointers.
  ZeroOptimizer(std::vector<OptimizerParamGroup> groups, const Group& group, const Make& make,
                const ZeroOptions& options = {});
  ZeroOptimizer(std::vector<at::Tensor> parameters, const Group& group, const Make& make,
                const ZeroOptions& options = {});
  // Does not communicate. With share_parameters the parameters stay one copy for all ranks, until a
  // Ddp is constructed with them, which gives each rank its own.
  ~ZeroOptimizer() override;
  ZeroOptimizer(ZeroOptimizer&&) noexcept;
  ZeroOptimizer& operator=(ZeroOptimizer&&) = delete;

  // Updates all parameters. Every rank calls it; with share_parameters, where the ranks have one
  // copy of the parameters, nothing is written before all have called it. A parameter without a
  // gradient is left as it is; all ranks must agree on which those are. A closure is run once,
  // before; its loss is returned. Throws CommError, also when the ranks' options differ, or when
  // one rank alone gave parameters other memory. Throws ConfigError, before anything changed, for a
  // sparse gradient, for parameters added to the groups since construction, for what was put into
  // state(), and on all ranks when several have written to a shared parameter since the last step,
  // and when gradients differ of parameters that belong to no Ddp, while others do: those that
  // DdpOptions::ignore names, unless the program averages them.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Elements whose state this rank holds.
  int64_t own_elements() const;
  // Whether the parameters are one memory for all ranks: when asked for, and possible.
  bool shares_parameters() const;

  // This rank's part of the state. Throws ConfigError on load when it was saved at another world
  // size or rank, or of other parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // A rank without a batch still owns its part: within a Join it makes the step with the others.
  void join(const JoinOptions&) override {}
  void leave() override {}
  bool shadow() override;

 private:
  friend class ZeroState;  // lockstep/parallel/stateful.h
  struct Parts;
  void check_groups() const;
  void check_state() const;
  void give_options() const;
  std::unique_ptr<Parts> parts_;
};

// A Make for an optimizer of libtorch, or one that is constructed as those are.
template <class Kind, class Options>
ZeroOptimizer::Make zero(Options options) {
  return [options](std::vector<OptimizerParamGroup> groups) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Kind>(std::move(groups), options);
  };
}

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::zero;
using parallel::ZeroOptimizer;
using parallel::ZeroOptions;
}  // namespace lockstep

// Fully sharded data parallel: each rank keeps its part of parameters, gradients and optimizer
// state, and has whole parameters only while it computes with them. After Rajbhandari et al.,
// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, and Zhao et al.,
// "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; docs/fsdp.md says
// where this differs.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/state.h"
#include "lockstep/comm/group.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/lanes.h"

namespace lockstep::parallel {

// What is sharded over the ranks of a shard group.
enum class Sharding {
  Full,       // parameters, gradients and optimizer state (ZeRO-3)
  Gradients,  // gradients and optimizer state; parameters are whole from a unit's forward to the
              // end of its backward (ZeRO-2)
  None,       // nothing: every rank has all, as under Ddp
};

// When the parameters of the unit that backward needs next are gathered.
enum class BackwardPrefetch {
  Before,  // before the current unit's gradients are computed: most overlap
  After,   // once they are: one unit less at a time
  None,    // when it is needed
};

// Where shards lie, and with them their gradients and what an optimizer makes of their size. An
// optimizer's step then runs on the CPU: FusedAdamW and its like for one pass over each. The bits
// are those of Offload::None and the same optimizer on the CPU.
enum class Offload {
  None,  // on the module's device
  Cpu,   // in the host's memory, pinned where that is CUDA's (PyTorch's CPUOffloadPolicy); a module
         // on the CPU has them there in any case
  File,  // in files that are mapped, so that the kernel writes to the disk what memory has no room
         // for. On the CPU, too. Ranks of one host then gather, as on several hosts
};

// How a model is sharded. The same on all ranks.
struct FsdpOptions {
  // Modules whose parameters are gathered together while lockstep::call() runs them; a module
  // within another one belongs to the inner one. Parameters of no unit, and those that several
  // units use, belong to the closest unit around them, the outermost of which is the model itself.
  // units_of() finds modules by type.
  std::vector<std::shared_ptr<torch::nn::Module>> units = {};
  // Above 0: further units are found by size, the innermost modules with at least this many
  // parameters that no unit has yet, and that are not part of one of libtorch's
  // (MultiheadAttention, Transformer and its layers, AdaptiveLogSoftmaxWithLoss), whose forward()
  // uses no call(). Lists and dictionaries of modules or parameters have no forward(), so theirs
  // count for the module around them; `units` refuses such a list by name. A layer whose weights
  // the model uses without its forward() (forward_with_packed_input(), a tied weight that is read)
  // cannot be told apart: choose `units` then.
  int64_t min_num_params = 0;

  Sharding sharding = Sharding::Full;
  // Ranks over which the model is sharded, this many consecutive ones; the groups replicate each
  // other. A divisor of the group's size; 0: all of them.
  int shard_ranks = 0;

  // Where ranks do not share a memory: a unit's parameters are freed after its forward, and
  // gathered again for its backward. Sharding::Gradients means false.
  bool reshard_after_forward = true;
  // Above 0: after its forward a unit stays sharded over this many consecutive ranks instead of
  // all, as with an integer for PyTorch's reshard_after_forward: more memory, and the gathers of
  // backward stay within them. A divisor of the number of ranks over which the model is sharded.
  int reshard_ranks = 0;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::Before;
  // Gathers the unit that the last forward called next.
  bool forward_prefetch = false;
  // Nothing is gathered ahead while this many units are whole, besides those in use.
  int64_t max_unsharded_units = 2;
  // Ranks of one host have one copy of the parameters between them, so that nothing is gathered.
  // false: each gathers its own, as on several hosts.
  bool share_memory = true;

  Offload offload = Offload::None;
  // With Offload::File: the folder of the files, on a disk of each rank's host; may differ between
  // ranks. A relative one is of the working directory in which the Fsdp was made. The files have no
  // names there, so nothing is left when the process ends. Room on the disk is taken when a file is
  // made: ConfigError where there is none, on all ranks for the shards and gradients, on the rank
  // whose disk is full for an optimizer's first step. The state of FusedAdam, FusedAdamW and
  // FusedSGD lies there; torch::optim makes its own in memory.
  std::string offload_folder = {};

  // What forward and backward compute in; optimizers see shards of the module's own dtype. The
  // module's parameters have this dtype from then on, and inputs of units that are floating-point
  // are converted to it.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  // What gradients are added up in; without it, param_dtype or the module's own. Those of several
  // backward() under hold(), too, which Ddp adds up in the module's own: the bits differ then.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  // What floating-point buffers are converted to.
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;

  // A step's batch is cut into this many lanes, and the result is the same bits for every number of
  // ranks up to that, and those of a Ddp with as many lanes (lockstep/parallel/lanes.h). All lanes
  // call the same units, unless ranks share a memory. Gradients are whole on each rank within a
  // step. Where ranks share no memory and their number does not divide that of lanes, parameters
  // are whole for the step, too.
  int64_t lanes = 0;
  // With lanes: how many threads each rank computes with, as DdpOptions::threads.
  int threads = 1;

  Buffers buffers = Buffers::Broadcast;
  // Names of parameters and buffers that Fsdp leaves alone. A checkpoint of it has them, too.
  std::vector<std::string> ignore = {};
};

// The modules of a type within another, for FsdpOptions::units.
template <class M>
std::vector<std::shared_ptr<torch::nn::Module>> units_of(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<torch::nn::Module>> found;
  for (const auto& each : module.modules(/*include_self=*/false)) {
    if (each->as<M>() != nullptr) found.push_back(each);
  }
  return found;
}
// As above, by the type's name, with or without its namespaces and "Impl": "Block". Throws
// ConfigError, which lists the types that there are, when none has it.
std::vector<std::shared_ptr<torch::nn::Module>> units_of(const torch::nn::Module& module,
                                                         const std::vector<std::string>& types);

// What each unit holds.
struct FsdpUnit {
  std::string name;  // of the module; "" for the rest of the model
  std::vector<std::string> parameters;
  int64_t numel = 0;      // of all ranks together
  int64_t own_numel = 0;  // of this rank
};

// A parameter's part on this rank.
struct FsdpShard {
  std::string name;            // of the parameter
  at::Tensor shard;            // one dimension; no elements where this rank has none
  std::vector<int64_t> sizes;  // of the parameter
  int64_t begin = 0;           // of the part, in the order of the parameter's memory
};

// Shards a module's parameters over the ranks. The module stays as it is: same type, same names,
// same sizes; layers that are units, and the module itself, are called by lockstep::call().
//
//   Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net)});
//   FusedAdamW adam(fsdp.parameters(), options);           // of the shards
//   for (auto [x, y] : loader.epoch(epoch)) {
//     fsdp.zero_grad();
//     cross_entropy(lockstep::call(net, x), y).backward();
//     fsdp.clip_grad_norm_(1.0);
//     adam.step();
//   }
//
// When backward() returns, each shard's gradient is its part of the average over the ranks, the
// same bits as under Ddp. One that throws leaves the shards' gradients as they were, and forgets
// what was accumulated under hold(), unless it ran under hold() itself. A shard that has a gradient
// already, because there was no zero_grad() since the last such backward(), has the average of the
// new ones added to it. Ddp averages what each rank has and the new one together: equal but for
// rounding. Gradients of several backward() have the bits of Ddp if all but the last ran under
// hold(). The module's own parameters have a placeholder in place of a gradient: defined, without
// memory; reading it throws. What net->zero_grad() or p.mutable_grad().reset() clears is gone from
// the shards when the next backward() begins, or in clip_grad_norm_(); an optimizer's step() before
// that still sees it. An optimizer of any class that treats every element by itself is given
// parameters(); its state is sharded in the same way. Shards may be written, in place, after a
// backward() that averages, after a forward under no_grad, or after reshard().
//
// Outside of its unit's forward and backward a parameter has no memory: an operation that reads or
// writes it throws c10::Error, which names the parameter and its unit. A unit's backward is over
// when the gradients of its inputs, of its parameters, and of all else that its forward used are
// known; where backward() does not reach all of them, at the end of backward(). The root unit's
// parameters have memory to the end. unshard() gives all their memory for a while.
//
// Tied parameters are one tensor that is registered under several names. Two tensors in the same
// memory, as set_data() makes them, would be taken apart and are refused, also if one of them is a
// buffer or ignored; parts of one buffer that lie side by side are not.
//
// Ranks: all construct it and make the same calls of units in the same order, also under no_grad:
// where they do not share a memory each of those gathers. Ranks that generate texts of different
// length do it between unshard() and reshard(). backward() and hold() are as under Ddp (hold()
// accumulates whole gradients, on each rank), except that where ranks gather, the losses of all
// ranks have to depend on the same units, and on the same parameters of the root unit and of units
// that have others within.
//
// With ranks of one host there is one copy of the parameters, in memory that they share, and
// nothing is gathered. A backward() that goes through a model whose parameters are all frozen ends
// with a barrier there, so that they may be written next (a target that follows a model): all ranks
// run it. Elsewhere the ranks gather a unit's parameters when it is called. Several models that one
// backward() reaches finish in the order in which their first gradients arrive: add their losses in
// the same order on all ranks.
//
// Refused, on all ranks, by ConfigError: a sparse gradient, hooks on the accumulation of a
// parameter's gradient, a parameter that changes its dtype or device afterwards, one that was
// frozen and is unfrozen (those that were trainable may be frozen and unfrozen again, as GANs do),
// a gradient of a parameter that another rank has frozen, or whose gradient was cleared on some
// ranks only, a gradient that arrives after its unit's were averaged, a write to shards after a
// forward in grad mode that has had no backward(), or between a forward after unshard() and
// reshard(), where ranks share a memory, and a parameter of another Fsdp or Ddp.
class Fsdp {
 public:
  // Throws ConfigError on all ranks as Ddp does, and when units are none of the module's, options
  // contradict each other, or parameters have memory in common. Parameters and buffers become rank
  // 0's. The module is kept as Ddp keeps it. Gradients that it has are dropped.
  Fsdp(const ModuleRef& module, const Group& group, FsdpOptions options = {});
  // Detaches. Does not communicate, so the parameters of several hosts' ranks have no memory from
  // then on, unless unshard() was called. Where ranks share a memory the parameters stay there, one
  // copy for all ranks, with the values of the last forward or unshard(): they are to be read, and
  // a Ddp or another Fsdp that is constructed with the module gives each rank its own. Before
  // anything else writes to them, give each rank a copy: p.set_data(p.detach().clone()).
  ~Fsdp();
  // One that was moved from may only be destroyed.
  Fsdp(Fsdp&&) noexcept;
  Fsdp& operator=(Fsdp&&) = delete;

  // This rank's part of each parameter that the module had at construction, in the module's order:
  // leaves for an optimizer. A frozen parameter's does not require a gradient.
  std::vector<at::Tensor> parameters() const;
  std::vector<FsdpShard> shards() const;
  std::vector<FsdpUnit> units() const;

  // Makes the shards' gradients undefined, and forgets what was accumulated under hold().
  void zero_grad();
  // While one lives, backward() accumulates whole gradients on this rank and communicates nothing.
  [[nodiscard]] Hold hold();

  // This rank's lanes of a step, as Ddp::lanes().
  template <std::same_as<Fsdp>... Others>
  LaneRange<BatchOfLane> lanes(const data::Step& step, const Others&... others) const {
    check_lanes(step.lane_count());
    return range({this, &others...}, step.next_key(), BatchOfLane{step});
  }
  // As above, for a program that makes its batches itself.
  template <std::same_as<Fsdp>... Others>
  LaneRange<NumberOfLane> lanes(const StepKey& key, const Others&... others) const {
    return range({this, &others...}, key, NumberOfLane{lane_count()});
  }
  // The number of lanes, 0 without.
  int64_t lane_count() const;

  // Ddp::fingerprint() of the whole module: the same number on all ranks, and under Ddp. Every rank
  // calls it, outside of forward and backward: between unshard() and reshard(), which it calls.
  uint64_t fingerprint();

  // parallel::clip_grad_norm_() over the parts of all ranks, without what FsdpOptions::ignore
  // names, whose gradients are each rank's own. Every rank calls it. The order in which the norm is
  // added up does not depend on the number of ranks or the units, nor do its bits.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0);

  // All parameters get their memory and keep it until reshard(), or a backward() that averages. All
  // ranks call them, outside of forward and backward. Parameters are to be read only: a write in
  // place, here or in forward(), makes the next backward() that averages throw ConfigError on all
  // ranks, or before it the end of a forward under no_grad, or reshard(), on the rank that wrote.
  // The model is lost then: where ranks share a memory it was written for all. A write by data()
  // is not found.
  void unshard();
  void reshard();
  // Whether all parameters have their memory by unshard().
  bool is_unsharded() const;

  // Buffers become rank 0's, also under Buffers::None, or averages. Every rank calls it, outside of
  // backward().
  void sync_buffers();
  // Whether the ranks have one copy of the parameters.
  bool shares_memory() const;

 private:
  friend class FsdpState;  // what a checkpoint saves
  friend class LaneMean;

  void check_lanes(int64_t of_step) const;
  std::vector<std::shared_ptr<LaneListener>> listeners_of(
      const std::vector<const Fsdp*>& all) const;
  std::shared_ptr<const LanePlan> plan() const;
  at::Device device() const;
  template <class Item>
  LaneRange<Item> range(const std::vector<const Fsdp*>& all, StepKey key, Item item) const {
    return {listeners_of(all), plan(), key, device(), std::move(item)};
  }

  class State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::BackwardPrefetch;
using parallel::Fsdp;
using parallel::FsdpOptions;
using parallel::Offload;
using parallel::Sharding;
using parallel::units_of;
}  // namespace lockstep

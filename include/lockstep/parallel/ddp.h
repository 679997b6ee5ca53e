// Distributed data parallel: every rank runs the same model on its own part of the batch, and
// backward() averages the gradients over the ranks. After Li et al., "PyTorch Distributed:
// Experiences on Accelerating Data Parallel Training", VLDB 2020; docs/architecture.md says where
// this differs.
#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/comm/group.h"
#include "lockstep/parallel/comm_hook.h"
#include "lockstep/parallel/ddp_log.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/lanes.h"

namespace lockstep::parallel {

// What happens to a parameter that this rank's backward did not reach.
enum class Unused {
  Zero,   // it counts as zero; when no rank reached it, its gradient is not touched
  Error,  // backward() throws ConfigError on all ranks, listing the parameters that some rank did
          // not reach; those that were frozen since count as reached
};

// The module's buffers (such as BatchNorm's running statistics). At construction they become rank
// 0's in any case. PyTorch broadcasts them before each forward; here they are when backward()
// returns, so that what an evaluation or a checkpoint sees between two steps is the same on all
// ranks. The next forward sees the same as in PyTorch, unless they were changed between the steps
// on some ranks only: sync_buffers() before that forward brings rank 0's to all (a warning says
// where it was missing).
//
// A buffer is written only when some rank has changed it. A graph that has saved it can then no
// longer run backward, on any rank (c10::Error "modified by an inplace operation", as in PyTorch):
// run all but the last backward() of such a graph under hold(). The running statistics of a
// BatchNorm layer in training (of torch::nn, or scripted in Python) do not count, because its
// gradient does not depend on them.
enum class Buffers {
  Broadcast,  // and again whenever a backward has averaged the gradients
  Average,    // then the average over the ranks; integers (and float8) become rank 0's
  None,       // each rank keeps its own from then on; a rank that has run out of batches within a
              // Join takes over those of one that had more
};

// How gradients are cut into buckets and averaged. The same on all ranks.
struct DdpOptions {
  // A bucket is closed when it holds at least this many bytes of gradients: each dtype's first
  // bucket, its second, and so on; the last number holds for all further ones. The first is small,
  // so that communication starts early. What is chosen here changes no bit of the result.
  std::vector<int64_t> bucket_bytes = {int64_t{1} << 20, int64_t{25} << 20};
  Unused unused = Unused::Zero;
  Buffers buffers = Buffers::Broadcast;
  // How buckets are averaged, if not by all_reduce. Not to be shared between Ddps.
  std::shared_ptr<CommHook> hook = nullptr;
  // Gradients are added in this dtype and rounded once, as float32 for bfloat16 parameters. Not
  // together with a hook.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  // Names of parameters and buffers that Ddp leaves alone: neither broadcast nor averaged, and free
  // to differ. Clip their gradients separately: a norm over both would differ between the ranks,
  // and so would the update of every parameter.
  std::vector<std::string> ignore = {};
  // Parameters whose gradients are sparse (layout at::kSparse), beside the tables of Embedding and
  // EmbeddingBag with sparse = true, which are found. They are sent to all ranks after the buckets,
  // without going through a hook: each rank's indices and values only.
  std::vector<std::string> sparse = {};
  // After this many passes all ranks compare their parameters and buffers, as check_same() does,
  // and the state that include_in_check() adds; 0: once, the parameters, at the end of the first
  // pass. backward() throws ConfigError on all ranks when they differ, which names the ranks and
  // the first parameter. What Ddp leaves alone (`ignore`, Buffers::None) is not compared. Passes
  // that do not communicate (LocalSgd) and, within a Join, those for which some rank has no batch
  // are not counted. The same on all ranks. The order of samples (SamplerOptions::seed) is compared
  // when a new one begins, also with 0. Parameters that each rank perturbs for its own backward()
  // and then puts back (m-SAM, noise on weights) differ then: give a number beyond the run's
  // passes, and call check_same() after steps. It reads all parameters on one thread, 22 GB a
  // second.
  int64_t check_same_every = 0;
  // A step's batch is cut into this many lanes, and the result is the same bits for every number of
  // ranks up to that (lockstep/parallel/lanes.h). Every backward() is then within a loop over
  // lanes(). The same on all ranks. 0: each rank runs its own batch.
  int64_t lanes = 0;
  // With lanes: how many threads each rank computes with, which the constructor sets for the whole
  // process. The order of sums within a kernel depends on it, so, like the seed, it has to stay the
  // same for a result to repeat.
  int threads = 1;
};

// Gradients that are reduced in one all_reduce.
struct BucketInfo {
  at::ScalarType dtype;
  int64_t bytes = 0;  // of gradients
  std::vector<std::string> names;
};

// While one exists, backward() only accumulates on this rank. The next backward() after it reduces
// the sum of everything that was accumulated.
class [[nodiscard]] Hold {
 public:
  // Ddp::hold() makes one.
  explicit Hold(std::shared_ptr<int> count) : count_(std::move(count)) { ++*count_; }
  ~Hold() {
    if (count_) --*count_;
  }
  Hold(Hold&&) = default;
  Hold& operator=(Hold&&) = delete;

 private:
  std::shared_ptr<int> count_;
};

// Attaches to a module, which stays as it is: same type, same names, same forward. From then on,
// when backward() returns, each rank has finished the computation of its own backward pass, and
// every gradient that the pass accumulated into is the average over the ranks; or it threw
// (CommError: a rank failed, disagreed or came late, and the group has failed; ConfigError: see
// below). After a throw the gradients are unspecified: zero_grad() before the next backward. When
// the group has one rank nothing is attached, nothing is communicated and backward() is libtorch's
// own: only the options and the module are checked.
//
// On a GPU (the module is on World::device()) backward() returns when all of that is enqueued: what
// the current stream does next comes after it, and a failure is thrown by a later call of the
// group.
//
// Ranks: all construct it, and all run backward() the same number of times outside hold(), in the
// same order for several models on one group. One backward() may reach several models, also on
// groups that differ, and ranks may add their losses in any order. (An exception is the first
// backward() that reaches two models of a group together after separate passes: losses that one
// rank adds in another order are a CommError there. On GPUs NCCL needs one order of its
// communicators: add losses of models on several groups in the same order there.) A Ddp and an Fsdp
// that one backward() reaches need a group each. A rank whose loss reaches no parameter does not
// average with the others, whose deadline then passes with an error that names it. A backward()
// inside another (re-entrant checkpointing) belongs to the outer one.
//
// Gradients are aliases of the buckets. One that is kept after it was cleared (kept = p.grad();
// zero_grad()) keeps its values, as in one process; the next backward overwrites views of it and
// what detach() of it returned: clone those. Gradients carry no history: after
// backward(create_graph = true) they cannot be differentiated; torch::autograd::grad() is not
// affected. A gradient that was replaced is copied in; one of another dtype, size or device is
// refused. optimizer.zero_grad() is fine, with set_to_none and without. Hooks on tensors run before
// the gradient is averaged, post-accumulate hooks too. A parameter may receive one gradient in a
// backward (activation checkpointing that reaches it twice is refused).
//
// While Ddp is attached, values may change freely: torch::load() of the module or any part of it is
// fine, and so is freezing parameters on all ranks, between steps; where one rank alone has frozen
// a parameter that another computes a gradient of, the next backward() throws ConfigError on all,
// and so it does where all have frozen it after a backward() under hold() in which only some of
// them reached it. A buffer may be replaced by one of the same sizes, dtype and device, as by
// forward() of a scripted module that assigns to it. Other changes need refresh(): parameters that
// were unfrozen, added or replaced (replace_module), a module converted by to(dtype) or to(device).
// Until then backward() throws. A change after which none of the parameters that it knows gets a
// gradient is found by zero_grad() only.
//
// With lanes, Ddp also attaches in a group of one, and gradients are averages over lanes: undefined
// within a step, and set when the last lane's backward() returns. What was in them before the step
// counts as a part of every lane's. Each rank keeps up to log2 of its lanes copies of the
// gradients. Under hold() a lane may run several backward(), of which the last is outside of it.
// Refused are a hook and reduce_dtype, Buffers::None for a module with buffers, SyncBatchNorm,
// Join, Averager and Python ranks: none of them is a function of lanes alone.
//
// What is refused is refused on all ranks by ConfigError, which names the rank where it was found
// and the parameter. (On a device that rank alone throws ConfigError, and the group ends.)
// Parameters belong to one Ddp at a time. One thread at a time may use a Ddp and its group.
class Ddp : public Joinable {
 public:
  // Throws ConfigError on all ranks when names, shapes, strides, dtypes or requires_grad of
  // parameters or buffers differ (naming the first difference, both values and both ranks), when
  // none is trainable, when one is not dense, not on the group's device or cannot be written to
  // (elements that share a memory, but for buffers made by expand()), when one belongs to another
  // Ddp, or when options name what the module does not have. Then parameters and buffers become
  // rank 0's. A parameter with two names counts once, under the first.
  //
  // The module may also be given as a std::shared_ptr, a module holder or a torch::jit::Module; one
  // that no shared_ptr owns must outlive the last backward().
  Ddp(const ModuleRef& module, const Group& group, DdpOptions options = {});
  // Detaches; the gradients stay valid. Does not communicate.
  ~Ddp() override;
  // One that was moved from may only be destroyed.
  Ddp(Ddp&&) noexcept;
  Ddp& operator=(Ddp&&) = delete;

  // Attaches to the module as it is now, as if constructed again with the same options: call it on
  // every rank, outside of backward(), after the module was changed. Throws what the constructor
  // does, and then stays attached as before. The log starts again; a hook keeps its state. Under
  // LocalSgd average first: parameters become rank 0's, as the constructor makes them. Not
  // between a forward and its backward(), which libtorch refuses when parameters have changed.
  void refresh();

  // Makes the gradients of all of the module's parameters undefined, which costs nothing: the next
  // backward writes over the buckets. Where it is called once a step, the next backward also
  // detects a rank that leaves out a batch after it, so ranks call it equally often; calls of an
  // optimizer's zero_grad() are invisible to Ddp (docs/architecture.md). A rank may look at
  // gradients of its own between steps: zero_grad(), backward() under hold(), and zero_grad() again
  // do not count where no rank accumulates otherwise. Throws ConfigError on all ranks when
  // parameters were added or replaced without refresh(), and a backward() since the last call gave
  // gradients to those alone, which were not averaged.
  void zero_grad();

  // Several may exist at once; accumulation ends when the last one is destroyed.
  [[nodiscard]] Hold hold();

  // Buffers become rank 0's, also under Buffers::None, or averages, with one small collective when
  // no rank has changed any.
  // Every rank calls it, outside of backward().
  void sync_buffers();

  // This rank's lanes of a step, one after another: for (auto [x, y] : ddp.lanes(step)). Other Ddps
  // whose gradients the body computes are named, too. Throws ConfigError when one does not have as
  // many lanes as the step. One loop at a time.
  template <std::same_as<Ddp>... Others>
  LaneRange<BatchOfLane> lanes(const data::Step& step, const Others&... others) const {
    check_lanes(step.lane_count());
    return range({this, &others...}, step.next_key(), BatchOfLane{step});
  }
  // As above, for a program that makes its batches itself, the one of lane l from nothing but the
  // step and l: for (Lane lane : ddp.lanes(StepKey{.seed = 1, .step = k})).
  template <std::same_as<Ddp>... Others>
  LaneRange<NumberOfLane> lanes(const StepKey& key, const Others&... others) const {
    return range({this, &others...}, key, NumberOfLane{lane_count()});
  }
  // The number of lanes, 0 without.
  int64_t lane_count() const;

  // A hash of this rank's parameters and buffers, to compare runs by: docs/reproducibility.md. It
  // reads all of them on one thread, 22 GB a second. With LOCKSTEP_FINGERPRINT=n in the environment
  // rank 0 logs it at the end of every n-th reducing backward().
  uint64_t fingerprint() const;

  // From now on check_same_every also compares this optimizer's options and its state of the
  // module's parameters. It has to outlive this; a second call replaces the optimizer. Called in
  // the same way on all ranks. Does not communicate.
  void include_in_check(const torch::optim::Optimizer& optimizer);

  // In the order in which they are reduced; none in a group of one.
  std::vector<BucketInfo> buckets() const;
  // Whether the buckets follow the order in which gradients arrived on rank 0, which the first
  // reducing backward finds.
  bool rebuilt() const;
  // Times of the last passes, to be read or traced; empty in a group of one.
  DdpLog log() const;

  void join(const JoinOptions& options) override;
  void leave() override;
  bool shadow() override;

 private:
  friend class LaneMean;
  friend class Join;
  struct State;

  // A Join that names `first` before all others is about to call join(). Throws ConfigError when
  // this one's group has a rank that the first one's has not.
  void begin_join(const Ddp& first);
  // No rank has a batch: averages what some have accumulated under hold(). Every rank calls it.
  void average_held();
  void check_lanes(int64_t of_step) const;
  std::vector<std::shared_ptr<LaneListener>> listeners_of(
      const std::vector<const Ddp*>& ddps) const;
  std::shared_ptr<const LanePlan> plan() const;
  at::Device device() const;
  template <class Item>
  LaneRange<Item> range(const std::vector<const Ddp*>& ddps, StepKey key, Item item) const {
    return {listeners_of(ddps), plan(), key, device(), std::move(item)};
  }

  std::unique_ptr<State> state_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::Buffers;
using parallel::Ddp;
using parallel::DdpOptions;
using parallel::Unused;
}  // namespace lockstep

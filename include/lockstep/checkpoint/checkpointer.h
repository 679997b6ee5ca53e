// Saves and restores everything that a run needs to resume, on any number of ranks.
//
//   Checkpointer checkpoints(world.group(), "runs/a", {.retention = {.keep_last = 3}});
//   checkpoints.track("net", net);
//   checkpoints.track("adam", adam);
//   checkpoints.track("loader", loader);
//   checkpoints.track_generators();
//   auto found = checkpoints.restore_latest();       // nothing on the first start
//   for (int64_t step = found ? found->step : 0; ...; ++step) {
//     ...
//     if (step % 1000 == 0) checkpoints.save(step);
//   }
//   checkpoints.finish();
#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/directory.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"

namespace lockstep::checkpoint {

// How checkpoints are kept and written.
struct CheckpointerOptions {
  // Patterns as the shell's ("optimizer/*") of tensors of which each rank has its own: what
  // LocalSgd trains, buffers under Buffers::None, parameters that a Ddp or Fsdp ignores, a replay
  // buffer. The name that an object is tracked under stands for all of its tensors, and a pattern
  // that is a name itself matches that name, brackets or not. Numbers, bools and texts have to be
  // the same on all ranks: keep one that differs in a tensor. The first save() warns of a pattern
  // without a tensor. Each rank's is saved, as NAME/rank-R, and goes back to that rank; with more
  // ranks than saved it, rank r gets that of r modulo their number. The same on all ranks. (save()
  // refuses other tensors that differ between ranks, as far as it sees it: it compares up to 256
  // elements of each, and on a device none.)
  std::vector<std::string> each_rank = {};
  Retention retention = {};
  // save() copies this rank's share into memory of its own, which it keeps for the next time, and
  // returns; a thread of low priority writes it. Where the process may have no further thread,
  // save() writes it, and the next call throws what failed, too. Without `async` save() returns
  // when the checkpoint is published.
  bool async = false;
  // How long ranks wait for each other while files are written or read.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // For tests. Has to outlive the checkpointer.
  FileSystem* files = nullptr;
};

// What to do when the newest checkpoint is damaged.
enum class Damaged {
  Error,
  FallBack,  // restore the newest one that is not, and log a warning
};

// What may differ between a checkpoint and what is tracked.
struct RestoreOptions {
  // Patterns as the shell's ("adam/*"), or names, also that of an object for all that it has: what
  // the checkpoint does not have and stays as it is, and what it has beside what is tracked.
  std::vector<std::string> allow_missing = {};
  std::vector<std::string> allow_unexpected = {};
  Damaged damaged = Damaged::Error;
};

// The checkpoint that was restored.
struct Restored {
  std::string folder;
  int64_t step = 0;
  std::map<std::string, double> metrics = {};
};

// Every rank constructs it, tracks the same objects in the same order under the same names, and
// calls save(), finish() and the restoring functions together. An error on any rank is thrown on
// all ranks, with its reason. save() and the restoring functions are collectives of the group that
// it was given, which no other thread calls meanwhile; an asynchronous save communicates in another
// group while it is written.
class Checkpointer {
 public:
  // A relative `directory` stays that of the working directory in which this was made. Nothing is
  // made or locked before the first save(). Throws ConfigError for options that are out of their
  // range, and for a group with Python ranks.
  Checkpointer(const comm::Group& group, std::string directory, CheckpointerOptions options = {});
  // Waits for what its thread is writing, and logs an error when that failed. Call finish() before,
  // which throws it. Where an exception ends the program's block, a save that takes longer than the
  // group's timeout is given up, as a rank may be stopped; what this rank writes is waited for.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Adds an object, which has to outlive this: a module (a scripted one, or a holder or shared
  // pointer of one, too), an optimizer, a Loader or DistributedSampler (a TorchSampler:
  // stateful(sampler, taken)), a number, bool, text or tensor, what lockstep/parallel/stateful.h
  // lists, or any other for which stateful(object) finds a function by argument-dependent lookup.
  // Optimizers call their state by the names of parameters of modules that are tracked (before or
  // after them). Throws ConfigError for a name that is empty, has a "/" or is there already, and
  // for a ZeroOptimizer whose group has another number of ranks.
  template <class T>
  requires requires(T& any) { stateful(any); }
  void track(const std::string& name, T& object) { track(name, stateful(object)); }
  // As above, for a Stateful, which describes itself.
  void track(const std::string& name, std::shared_ptr<Stateful> object);
  // A module holder. The module is not kept: when it has been replaced by another and is gone,
  // save() and the restoring functions throw.
  template <class Contained>
  void track(const std::string& name, torch::nn::ModuleHolder<Contained>& holder) {
    track(name, stateful_module(name, holder.is_empty() ? nullptr : holder.ptr()));
  }
  // A module that is shared, as with a holder.
  template <std::derived_from<torch::nn::Module> M>
  void track(const std::string& name, const std::shared_ptr<M>& module) {
    track(name, stateful_module(name, module));
  }
  // libtorch's default generators of each rank, of the CPU and, where there are any, of its current
  // CUDA device, as "generators". One that is missing where it was saved or where it is restored
  // (no GPU) stays as it is, with a warning. A rank that was not there when they were saved begins
  // with numbers that no other rank has; where the ranks that saved ran lanes, and so drew the same
  // numbers, with theirs. What is drawn after restoring continues where it was, also when a Ddp is
  // constructed only then (seed_everything() with a group).
  void track_generators();
  // A generator of one's own, of which each rank has another (with lanes, the same).
  void track(const std::string& name, const at::Generator& generator);

  // Saves everything as step `step`, between two steps of training. Throws CheckpointError on all
  // ranks when any of them failed (and when the writing of the one before failed: that one is not
  // there then); CommError when a rank is gone. What was saved before stays as it is.
  void save(int64_t step, std::map<std::string, double> metrics = {});

  // Sets Retention::Best::limit, for what save() removes from now on: how good the best checkpoint
  // of this run is. The same on all ranks. Nothing without Retention::best.
  void limit_best(double value);

  // Waits until everything is published. Throws as save().
  void finish();

  // Restores the newest checkpoint; nothing when there is none. Tensors are read where they lie;
  // their bytes are verified before anything changes. Throws CheckpointError on all ranks, and then
  // nothing has changed, when a file is damaged (it names file and tensor), and when names are
  // missing or unexpected, or have other sizes or dtypes (it lists them), when an object refuses
  // what was saved, and when the ranks would restore different checkpoints. One name of a tied
  // parameter is enough.
  std::optional<Restored> restore_latest(const RestoreOptions& options = {});
  // As restore_latest(), for the checkpoint in `folder`: the same checkpoint on all ranks.
  Restored restore(const std::string& folder, const RestoreOptions& options = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::checkpoint

namespace lockstep {
using checkpoint::Checkpointer;
using checkpoint::CheckpointerOptions;
using checkpoint::RestoreOptions;
}  // namespace lockstep

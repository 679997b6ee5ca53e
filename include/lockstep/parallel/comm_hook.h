// How a bucket of gradients is averaged over the ranks when it is not by a plain all_reduce. After
// PyTorch's "DDP Communication Hooks".
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// Gradients that are reduced together. The order and number of buckets change once, after the first
// pass; a parameter's name and the shape of its gradient do not.
struct Bucket {
  size_t index = 0;
  bool last = false;  // of the pass
  // 1-D, contiguous, in the group's own memory: the gradients one after another, with zeros between
  // them. Complex ones are pairs of real numbers.
  at::Tensor flat;
  // The parameters' gradients as aliases of `flat`, the parameters, and their names.
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
};

// A hook belongs to one Ddp: the constructor of a second one throws ConfigError while the first
// lives. A parameter that no rank used in a pass keeps its gradient, regardless of what the hook
// computes for it.
class CommHook {
 public:
  virtual ~CommHook() = default;
  // Its name in logs and errors.
  virtual std::string_view name() const = 0;

  // Starts to replace bucket.flat by its average over the group (or what the hook has for it).
  // Called within backward(), on all ranks for the same buckets in the same order. What has to
  // follow a first collective goes into comm::then(). An exception ends that backward() and leaves
  // the gradients unspecified.
  virtual comm::Work start(const Group& group, const Bucket& bucket) = 0;

  // Called at the beginning of a pass; must return the same on all ranks. When false, start() does
  // not communicate with ranks outside subgroup() in this pass, and neither does Ddp: buffers are
  // left alone, and a parameter that none of them reached keeps its gradient. Not possible within a
  // Join.
  virtual bool communicates() const { return true; }
  // For a hook that does not communicate in every pass: the ranks among which start() averages in
  // the others, a group of one where it does not. Ddp then treats unused parameters and sparse
  // gradients as if those were all ranks. None for a hook that always communicates.
  virtual std::optional<Group> subgroup() const { return std::nullopt; }

  // Called at the end of each pass, with the names of parameters that no rank used in it, or of all
  // when backward() throws ConfigError on all ranks. Their gradients are not what start() computed,
  // so what the hook carries for them has to be what it was before the pass; otherwise a part of
  // their next gradient is lost.
  virtual void end_pass(const std::vector<std::string>& unused);

  // Called by Ddp's constructor and by refresh() on every rank, between passes: the parameters
  // whose gradients the hook will see, by name, and those that are frozen, for which it may carry
  // something from before they were. What the hook carries for a parameter stays with
  // that tensor: when the module has changed, another parameter may have its name. What it
  // throws on one rank (because the restored state belongs to other parameters, for instance) is a
  // ConfigError of the constructors of all ranks.
  virtual void attach(const std::map<std::string, at::Tensor>& parameters);

  // What the hook carries from pass to pass on this rank, by name, for a checkpoint; restore()
  // takes the same back and throws ConfigError, having changed nothing, for a state that does not
  // fit: a name, shape or dtype that does not belong to the parameters, a tensor that is not
  // finite. A parameter that was added after the last pass may have none. Before Ddp is attached
  // the hook does not know the parameters; attach() throws then.
  virtual std::map<std::string, at::Tensor> state() const { return {}; }
  virtual void restore(const std::map<std::string, at::Tensor>& state);
  // Throws what restore() would throw for tensors of these sizes and dtypes, and changes nothing.
  // A checkpoint calls it, with zeros, before it restores anything. Without an override a state
  // that does not fit is found by restore() alone, after other objects were restored.
  virtual void check(const std::map<std::string, at::Tensor>& state) const;
  // Whether what state() calls so is the same on all ranks, as a count of passes, or all of an
  // error that is left to send, of which ranks have parts. A checkpoint that another number of
  // ranks restores gives each of them rank 0's of the former, and the mean over ranks of the
  // latter, for which all ranks' have to have one shape and dtype; else restoring throws
  // ConfigError on all ranks, before anything changed. What is not of floating point is the same on
  // all in any case.
  virtual bool is_same_on_all(std::string_view /*name*/) const { return false; }

  // From the next pass on gradients are `factor` times what they were, because GradScaler changed
  // the loss scale: what the hook carries has to follow. Throws ConfigError when a hook that has a
  // state does not override it.
  virtual void rescale(double factor);

  // Bytes this rank has handed to collectives since the hook was made.
  virtual int64_t bytes_sent() const = 0;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::CommHook;
}  // namespace lockstep

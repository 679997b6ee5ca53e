// Batch normalisation over the batches of all ranks (Ioffe and Szegedy, ICML 2015): with few
// samples on each rank, statistics of one rank's alone are too noisy to train with.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <type_traits>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

class JoinGate;

// libtorch's layer of D dimensions.
template <size_t D>
using TorchBatchNormImpl = std::conditional_t<
    D == 1, torch::nn::BatchNorm1dImpl,
    std::conditional_t<D == 2, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>>;

// torch::nn::BatchNorm{1,2,3}d whose statistics in training are those of the group's whole batch.
// Options, names, shapes, running statistics and eval() are BatchNorm's, to the bit; so is all of
// it in a group of one, so that a model may be written with SyncBatchNorm and given a group later.
//
// In training, forward() is one all_reduce of 2 C + 1 float64 values and backward() one of 2 C
// float64 (none when the input needs no gradient). Ranks: all call forward() equally often; their
// batches may differ in size and one rank's may be empty. Statistics travel as float64 sums, so
// ranks agree on them to the bit; they differ from one process's on the whole batch by roundings of
// float32. The gradients of weight and bias are this rank's share: Ddp averages them. Half and
// bfloat16 inputs are normalised with float32 statistics. As in PyTorch, a module without running
// statistics takes this rank's alone in eval().
//
// forward() throws ConfigError: when the group's batch holds one value a channel (on all ranks),
// for an input of other dimensions or channels. backward() throws ConfigError under create_graph.
template <size_t D>
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl<D>> {
 public:
  // `group`'s collectives are called in forward() and backward(). Nothing else may use the group,
  // unless all ranks make their calls on it in the same order: split() makes another group of the
  // same ranks.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const Group& group = {});

  // Shares the layer's tensors and takes its options and mode.
  SyncBatchNormImpl(const TorchBatchNormImpl<D>& layer, const Group& group);

  // Input of N x C x D further dimensions (1d: none, too). In training a collective.
  at::Tensor forward(const at::Tensor& input);
  // Like reset() of torch::nn's BatchNorm: creates the tensors again.
  void reset() override;
  // Like pretty_print() of torch::nn's BatchNorm.
  void pretty_print(std::ostream& stream) const override;

  // Over which it normalises.
  const Group& group() const { return group_; }
  void set_group(const Group& group) { group_ = group; }
  // Asked before forward() communicates. Private to Join.
  void set_gate(const std::weak_ptr<JoinGate>& gate) { gate_ = gate; }

  torch::nn::BatchNormOptions options;
  // Undefined without affine, and without track_running_stats.
  at::Tensor weight, bias;
  at::Tensor running_mean, running_var, num_batches_tracked;

 private:
  Group group_;
  std::weak_ptr<JoinGate> gate_;
};

extern template class SyncBatchNormImpl<1>;
extern template class SyncBatchNormImpl<2>;
extern template class SyncBatchNormImpl<3>;

// What the holders SyncBatchNorm1d, SyncBatchNorm2d and SyncBatchNorm3d hold.
using SyncBatchNorm1dImpl = SyncBatchNormImpl<1>;
using SyncBatchNorm2dImpl = SyncBatchNormImpl<2>;
using SyncBatchNorm3dImpl = SyncBatchNormImpl<3>;
TORCH_MODULE(SyncBatchNorm1d);
TORCH_MODULE(SyncBatchNorm2d);
TORCH_MODULE(SyncBatchNorm3d);

// Makes all batch normalisation below `module` synchronous over `group` and returns how many layers
// that are. SyncBatchNorm layers are given the group. torch::nn::BatchNorm{1,2,3}d layers are
// replaced in Sequential, ModuleList, ModuleDict and among registered children, by ones with the
// same name, the same parameter and buffer tensors (an optimizer made before stays right), options
// and mode.
//
// Ranks: all call it, for the same module; ranks of `group` (as Group::split makes them) normalise
// together. The layers communicate over a new group of the same ranks, so that their calls and
// those of a Ddp on `group` may come in different orders on the ranks.
//
// C++ binds a layer's forward() at compile time, so a torch BatchNorm that a member variable (or
// any other handle) holds, one of a derived class, and `module` being one itself, stay where they
// are; from then on aten::batch_norm() is synchronous for their weights and running statistics,
// with the same results. A clone() of such a layer is not synchronous. One that has neither throws
// ConfigError which names it, before anything has changed: declare it as lockstep::SyncBatchNorm2d,
// which is a BatchNorm2d until then.
//
// The module may also be given as a std::shared_ptr or a module holder; ConfigError for an empty
// one.
size_t convert_sync_batch_norm(torch::nn::Module& module, const Group& group);
size_t convert_sync_batch_norm(const std::shared_ptr<torch::nn::Module>& module,
                               const Group& group);
// As above, for a module holder.
template <class Contained>
size_t convert_sync_batch_norm(const torch::nn::ModuleHolder<Contained>& holder,
                               const Group& group) {
  return convert_sync_batch_norm(holder.is_empty() ? nullptr : holder.ptr(), group);
}

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::convert_sync_batch_norm;
using parallel::SyncBatchNorm1d;
using parallel::SyncBatchNorm2d;
using parallel::SyncBatchNorm3d;
}  // namespace lockstep

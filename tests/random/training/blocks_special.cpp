// Blocks of what is particular to some programs: communication in the forward, recomputation in the
// backward, random numbers, parameters that are complex or have no elements.
#include <torch/torch.h>

#include "lockstep/parallel/call.h"
#include "lockstep/parallel/functional.h"
#include "lockstep/parallel/random.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "random/training/net.h"

namespace lockstep::test::training {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SyncNormBlock : Block {
  // `converts`: the layer keeps its type, and what it calls is synchronous.
  SyncNormBlock(const Group& group, bool converts) {
    const auto options = torch::nn::BatchNormOptions(kFeatures);
    if (group.size() > 1 && !converts) {
      sync = register_module("norm", SyncBatchNorm1d(options, group.split(0)));
      sync->to(at::kDouble);
    } else {
      whole = register_module("norm", torch::nn::BatchNorm1d(options));
      whole->to(at::kDouble);
      if (group.size() > 1) parallel::convert_sync_batch_norm(*this, group);
    }
  }
  bool joins_lanes() const override { return true; }
  std::vector<at::Tensor> forward_all(const std::vector<Block*>& row,
                                      const std::vector<at::Tensor>& xs) override {
    if (sync) return {lockstep::call(sync, xs[0])};
    if (row.size() == 1) return {lockstep::call(whole, xs[0])};
    // Statistics of the whole batch, and each lane's own weight and bias.
    std::vector<int64_t> sizes;
    for (const auto& x : xs) sizes.push_back(x.size(0));
    const auto parts =
        at::batch_norm(at::cat(xs), {}, {}, whole->running_mean, whole->running_var,
                       whole->is_training(), *whole->options.momentum(), whole->options.eps(),
                       /*cudnn_enabled=*/false)
            .split_with_sizes(sizes);
    std::vector<at::Tensor> ys;
    for (size_t lane = 0; lane < row.size(); ++lane) {
      auto& norm = dynamic_cast<SyncNormBlock*>(row[lane])->whole;
      if (whole->is_training()) norm->num_batches_tracked += 1;
      if (lane > 0) {
        norm->running_mean.copy_(whole->running_mean);
        norm->running_var.copy_(whole->running_var);
      }
      ys.push_back(parts[lane] * norm->weight + norm->bias);
    }
    return ys;
  }
  SyncBatchNorm1d sync{nullptr};
  torch::nn::BatchNorm1d whole{nullptr};
};

// Each sample sees the mean of all ranks' samples.
struct GatheredBlock : Block {
  enum class By { Gathering, Reducing, Scattering, Exchanging };
  GatheredBlock(const Group& world, By how) : by(how) {
    if (world.size() > 1) group = world.split(0);
  }
  bool joins_lanes() const override { return true; }
  std::vector<at::Tensor> forward_all(const std::vector<Block*>&,
                                      const std::vector<at::Tensor>& xs) override {
    const at::Tensor own = at::cat(xs);
    const at::Tensor mean = by == By::Gathering ? functional::all_gather(own, group).mean(0)
                                                : sum(own.sum(0)) / sum(own.size(0));
    std::vector<at::Tensor> ys;
    for (const auto& x : xs) ys.push_back(x + torch::tanh(mean) / 2);
    return ys;
  }
  at::Tensor sum(int64_t rows) const { return sum(at::full({1}, rows, at::kDouble)); }
  at::Tensor sum(const at::Tensor& own) const {
    if (by == By::Reducing) return functional::all_reduce(own, group);
    const at::Tensor copies = own.expand({group.size(), -1});
    if (by == By::Scattering) return functional::reduce_scatter(copies, group).sum(0);
    const std::vector<int64_t> counts(static_cast<size_t>(group.size()), 1);
    return functional::all_to_all(copies, counts, group).rows.sum(0);
  }
  Group group;
  By by;
};

struct DropoutBlock : Block {
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment& moment) override {
    const RandomStream stream(
        {.seed = moment.seed, .step = moment.step * 100 + moment.micro, .lane = moment.lane});
    return torch::dropout(x, 0.3, is_training());
  }
};

// Keeps no activations; the backward computes them again and runs a backward of its own.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = layer;
    return lockstep::call(*reinterpret_cast<torch::nn::LinearImpl*>(layer), x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& layer = *reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_(true);
    {
      const at::AutoGradMode enable_grad(true);
      lockstep::call(layer, x).backward(gradients[0]);
    }
    return {x.grad(), {}};
  }
};

struct CheckpointBlock : Block {
  CheckpointBlock() {
    layer = register_module("layer", torch::nn::Linear(kFeatures, kFeatures));
    layer->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    // A first layer's input needs a gradient, or the function would have none.
    const auto input = x.requires_grad() ? x : x.detach().requires_grad_(true);
    return torch::tanh(Recompute::apply(input, reinterpret_cast<int64_t>(layer.get())));
  }
  torch::nn::Linear layer{nullptr};
};

struct ComplexBlock : Block {
  explicit ComplexBlock(at::ScalarType own) : dtype(own) {
    weight = register_parameter(
        "weight", (torch::randn({kFeatures, kFeatures}, at::kComplexDouble) * 0.4).to(dtype));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    const auto y = at::matmul(x.to(dtype), weight);
    return torch::tanh((at::real(y) + at::imag(y)).to(at::kDouble));
  }
  at::ScalarType dtype;
  at::Tensor weight;
};

struct EmptyBlock : Block {
  EmptyBlock() { nothing = register_parameter("nothing", torch::zeros({0, 4}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    return x + nothing.sum();
  }
  at::Tensor nothing;
};

// Counts its forwards in buffers of several dtypes; each rank's counts differ.
struct CounterBlock : Block {
  CounterBlock() {
    count = register_buffer("count", at::zeros({2}, at::kLong));
    mean = register_buffer("mean", at::zeros({3}, at::kFloat));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment& moment) override {
    if (!is_training()) return x;
    count += 1 + moment.lane;
    mean += 0.5 + moment.lane;
    return x;
  }
  at::Tensor count, mean;
};

}  // namespace

void add_special_blocks(std::map<std::string, MakeBlock>& table) {
  table["sync_batch_norm"] = [](Random& random, const Group& group) {
    return std::make_shared<SyncNormBlock>(group, random.chance(0.5));
  };
  table["gathered"] = [](Random& random, const Group& group) {
    return std::make_shared<GatheredBlock>(
        group, random.pick({GatheredBlock::By::Gathering, GatheredBlock::By::Reducing,
                            GatheredBlock::By::Scattering, GatheredBlock::By::Exchanging}));
  };
  table["dropout"] = [](Random&, const Group&) { return std::make_shared<DropoutBlock>(); };
  table["checkpoint"] = [](Random&, const Group&) { return std::make_shared<CheckpointBlock>(); };
  table["complex"] = [](Random& random, const Group&) {
    return std::make_shared<ComplexBlock>(random.pick({at::kComplexDouble, at::kComplexFloat}));
  };
  table["no_elements"] = [](Random&, const Group&) { return std::make_shared<EmptyBlock>(); };
  table["counter"] = [](Random&, const Group&) { return std::make_shared<CounterBlock>(); };
}

}  // namespace lockstep::test::training

#include "random/changes/net.h"

#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"

namespace lockstep::test::changes {
namespace {

constexpr int64_t kFeatures = 6;
// A weight has more than the 1,024 elements at which a ZeroOptimizer cuts.
constexpr int64_t kHidden = 200;

at::Tensor drawn_tensor(uint64_t seed, at::IntArrayRef sizes, double scale) {
  const auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::kDouble) * scale;
}

torch::nn::Linear linear(int64_t in, int64_t out, uint64_t seed) {
  torch::nn::Linear made(in, out);
  made->to(at::kDouble);
  const at::NoGradGuard no_grad;
  made->weight.copy_(drawn_tensor(seed, {out, in}, 0.1));
  made->bias.copy_(drawn_tensor(seed + 1, {out}, 0.1));
  return made;
}

}  // namespace

torch::nn::Linear up_layer(uint64_t seed) { return linear(kFeatures, kHidden, seed); }

BlockImpl::BlockImpl(uint64_t seed)
    : up(register_module("up", up_layer(seed))),
      down(register_module("down", linear(kHidden, kFeatures, seed + 7))) {}

at::Tensor BlockImpl::forward(const at::Tensor& x) { return x + down(at::tanh(up(x))); }

NetImpl::NetImpl(uint64_t seed) {
  for (uint64_t i = 0; i < kBlocks; ++i) {
    blocks.push_back(register_module(fmt::format("block{}", i), Block(mixed(seed, i))));
  }
  seen = register_buffer("seen", at::zeros({3}, at::kDouble));
}

at::Tensor NetImpl::forward(at::Tensor x) {
  seen.mul_(0.5).add_(1);
  for (int i = 0; i < kBlocks; ++i) {
    if (!skipped.contains(i)) x = lockstep::call(blocks[static_cast<size_t>(i)], x);
  }
  return x.sum(1);
}

double rate_of(const std::string& optimizer) { return optimizer.ends_with("sgd") ? 1e-4 : 1e-2; }

std::unique_ptr<Optimizer> made(const std::string& name, std::vector<OptimizerParamGroup> groups) {
  using namespace torch::optim;
  const double rate = rate_of(name);
  const auto sgd = SGDOptions(rate).momentum(0.9).weight_decay(0.1);
  const auto adamw = AdamWOptions(rate).eps(1e-3).weight_decay(0.1);
  if (name == "sgd") return std::make_unique<SGD>(std::move(groups), sgd);
  if (name == "adam") {
    return std::make_unique<Adam>(std::move(groups), AdamOptions(rate).eps(1e-3));
  }
  if (name == "adamw") return std::make_unique<AdamW>(std::move(groups), adamw);
  if (name == "fused_sgd") return std::make_unique<parallel::FusedSGD>(std::move(groups), sgd);
  return std::make_unique<parallel::FusedAdamW>(std::move(groups), adamw);
}

data::TensorDataset samples_of(uint64_t seed) {
  return {drawn_tensor(mixed(seed, 100), {kEpoch, kFeatures}, 1),
          drawn_tensor(mixed(seed, 101), {kEpoch}, 1)};
}

std::string difference(const Named& got, const Named& want, double tolerance) {
  if (got.size() != want.size()) return fmt::format("{} values, want {}", got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const auto& [name, a] = got[i];
    const auto& [other, b] = want[i];
    if (name != other || a.sizes() != b.sizes()) return name + " in the place of " + other;
    if (at::allclose(a, b, tolerance, tolerance, /*equal_nan=*/true)) continue;
    const auto gap = (a - b).abs().max();
    return fmt::format("{} differs by {}", name, gap.item().toDouble());
  }
  return {};
}

std::string bytes_of(const Named& state) {
  std::string bytes;
  for (const auto& [name, tensor] : state) {
    const auto whole = tensor.contiguous();
    bytes.append(static_cast<const char*>(whole.const_data_ptr()), whole.nbytes());
  }
  return bytes;
}

}  // namespace lockstep::test::changes

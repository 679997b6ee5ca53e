// A module that changes its buffers and is run twice.
#include "lockstep/parallel/activation_checkpointing.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "lockstep/lockstep.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

namespace F = torch::nn::functional;

// Spectral normalisation, as PyTorch's: each forward moves the vectors on by one iteration.
struct SpectralImpl : torch::nn::Module {
  SpectralImpl() {
    weight = register_parameter("weight", torch::randn({24, 24}, at::kDouble));
    left = register_buffer(
        "left", F::normalize(torch::randn({24}, at::kDouble), F::NormalizeFuncOptions().dim(0)));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor u;
    at::Tensor v;
    {
      const at::NoGradGuard no_grad;
      const auto unit = F::NormalizeFuncOptions().dim(0);
      v = F::normalize(weight.t().mv(left), unit);
      left.copy_(F::normalize(weight.mv(v), unit));
      u = left.clone();
    }
    return F::linear(x, weight / u.dot(weight.mv(v)));
  }
  at::Tensor weight, left;
};
TORCH_MODULE(Spectral);

struct BlockOfStatisticsImpl : torch::nn::Module {
  BlockOfStatisticsImpl() {
    spectral = register_module("spectral", Spectral());
    norm = register_module(
        "norm", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(24).momentum(std::nullopt)));
    // A large table that nothing changes, and one that repeats its elements.
    table = register_buffer("table", torch::linspace(0, 1, 24, at::kDouble));
    scale = register_buffer("scale", torch::ones({1}, at::kDouble).expand({24}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(call(norm, call(spectral, x)) * scale + table);
  }
  Spectral spectral{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor table, scale;
};
TORCH_MODULE(BlockOfStatistics);

struct StatisticsNetImpl : torch::nn::Module {
  StatisticsNetImpl() {
    torch::manual_seed(4);
    first = register_module("first", BlockOfStatistics());
    second = register_module("second", BlockOfStatistics());
    this->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return call(second, call(first, x)); }
  BlockOfStatistics first{nullptr}, second{nullptr};
};
TORCH_MODULE(StatisticsNet);

at::Tensor rows_of(int rank, int step) {
  return at::randn({6, 24}, at::detail::createCPUGenerator(100 * step + rank), at::kDouble);
}

void expect_alike(const StatisticsNet& net, const StatisticsNet& usual, int step) {
  const auto parameters = usual->named_parameters(), buffers = usual->named_buffers();
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value().grad(), parameters[item.key()].grad()))
        << step << " " << item.key();
  }
  for (const auto& item : net->named_buffers()) {
    EXPECT_TRUE(at::equal(item.value(), buffers[item.key()])) << step << " " << item.key();
  }
}

std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const StatisticsNet& net) {
  return {net->first.ptr(), net->second.ptr()};
}

TEST(ActivationCheckpointing, ASecondRunLeavesBuffersAsTheFirstDid) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      const StatisticsNet net, usual;
      const ActivationCheckpointing recompute(blocks_of(net));
      Ddp ddp(net, world), plain(usual, world);
      for (int step = 0; step < 3; ++step) {
        for (const auto& [model, its] : {std::pair(&net, &ddp), std::pair(&usual, &plain)}) {
          its->zero_grad();
          call(*model, rows_of(world.rank(), step)).square().mean().backward();
        }
        expect_alike(net, usual, step);
      }
    });
  }
}

// A layer that is called twice begins each second run with what that call began with.
TEST(ActivationCheckpointing, BuffersOfSeveralCallsAndOfNestedOnes) {
  isolated([] {
    const StatisticsNet net, usual;
    auto modules = blocks_of(net);
    modules.push_back(net->first->spectral.ptr());
    modules.push_back(net.ptr());
    const ActivationCheckpointing recompute(modules);
    for (const auto& model : {net, usual}) {
      const at::Tensor once = call(model, rows_of(0, 0));
      const at::Tensor twice = call(model, rows_of(1, 0));
      (once.square().mean() + twice.pow(3).mean()).backward();
    }
    const auto parameters = usual->named_parameters(), buffers = usual->named_buffers();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(at::allclose(item.value().grad(), parameters[item.key()].grad(), 1e-12, 1e-14))
          << item.key();
    }
    for (const auto& item : net->named_buffers()) {
      EXPECT_TRUE(at::equal(item.value(), buffers[item.key()])) << item.key();
    }
  });
}

// A graph that is kept runs its backward again, and each time from what its call began with.
TEST(ActivationCheckpointing, BuffersOfAGraphThatIsKept) {
  isolated([] {
    const StatisticsNet net, usual;
    const ActivationCheckpointing recompute(blocks_of(net));
    for (const auto& model : {net, usual}) {
      const at::Tensor loss = call(model, rows_of(0, 0)).square().mean();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    }
    expect_alike(net, usual, 0);
  });
}

// The second use is outside of the checkpointed module, and both are within one Autocast.
TEST(ActivationCheckpointing, AWeightThatIsUsedOutsideToo) {
  isolated([] {
    torch::manual_seed(3);
    const torch::nn::Linear net(24, 24), usual(24, 24);
    {
      const at::NoGradGuard no_grad;
      usual->weight.copy_(net->weight);
      usual->bias.copy_(net->bias);
    }
    const ActivationCheckpointing recompute({net.ptr()});
    const at::Tensor x = rows_of(0, 0).to(at::kFloat);
    for (const auto& model : {net, usual}) {
      at::Tensor loss;
      {
        const Autocast autocast(at::kCPU, at::kBFloat16);
        const at::Tensor first = call(model, x);
        const at::Tensor second = F::linear(x, model->weight, model->bias);
        loss = (first.square() + 3 * second).to(at::kFloat).mean();
      }
      loss.backward();
    }
    EXPECT_TRUE(at::allclose(net->weight.grad(), usual->weight.grad(), 1e-2, 1e-3))
        << (net->weight.grad() - usual->weight.grad()).abs().max().item<double>();
    EXPECT_TRUE(at::allclose(net->bias.grad(), usual->bias.grad(), 1e-2, 1e-3));
  });
}

}  // namespace
}  // namespace lockstep::test

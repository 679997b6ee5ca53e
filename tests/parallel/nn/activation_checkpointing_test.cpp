// A module that changes its buffers and is run twice.
#include "lockstep/parallel/activation_checkpointing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/lockstep.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

namespace F = torch::nn::functional;
using ::testing::AllOf;
using ::testing::HasSubstr;

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

template <class Net>
void expect_alike(const Net& net, const Net& usual, int step) {
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

// One layer under two names, and two buffers that share memory.
struct TwoNamesImpl : torch::nn::Module {
  TwoNamesImpl() {
    torch::manual_seed(4);
    norm = register_module("norm", torch::nn::BatchNorm1d(24));
    register_module("again", norm);
    this->to(at::kDouble);
    all = register_buffer("all", at::zeros({2, 24}, at::kDouble));
    half = register_buffer("half", all[1]);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = norm(x);
    half.add_(x.detach().square().mean(0));
    all.mul_(0.5).add_(x.detach().mean(0));
    return y * half.clone();
  }
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor all, half;
};

TEST(ActivationCheckpointing, BuffersThatAreThereTwice) {
  spawn(2, [](World& world) {
    const auto net = std::make_shared<TwoNamesImpl>(), usual = std::make_shared<TwoNamesImpl>();
    const ActivationCheckpointing recompute({net});
    Ddp ddp(net, world), plain(usual, world);
    for (int step = 0; step < 3; ++step) {
      for (const auto& [model, its] : {std::pair(net, &ddp), std::pair(usual, &plain)}) {
        its->zero_grad();
        call(model, rows_of(world.rank(), step)).square().mean().backward();
      }
      expect_alike(net, usual, step);
    }
  });
}

// What else has the new tensor, here a scripted module, could not be given the old one.
TEST(ActivationCheckpointing, BuffersThatForwardReplacesAreRefused) {
  struct Replaces : torch::nn::Module {
    explicit Replaces(const std::string& update) {
      script.register_buffer("mean", mean);
      script.define("def forward(self, x):\n  " + update + "\n  return x * self.mean\n");
    }
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = script.forward({x}).toTensor();
      mean = script.attr("mean").toTensor();
      return y;
    }
    at::Tensor& mean = register_buffer("mean", at::ones({24}, at::kDouble));
    torch::jit::Module script{"Script"};
  };
  spawn(2, [](World& world) {
    const auto gradient_and_mean = [&](const std::string& update, bool recomputes) {
      const auto net = std::make_shared<Replaces>(update);
      std::optional<ActivationCheckpointing> recompute;
      if (recomputes) recompute.emplace(std::vector<std::shared_ptr<torch::nn::Module>>{net});
      const at::Tensor x = rows_of(world.rank(), 0).requires_grad_();
      call(net, x).sum().backward();
      return at::cat({x.grad(), net->mean.unsqueeze(0)});
    };
    const std::string assigns = "self.mean = 0.9 * self.mean + 0.1 * torch.mean(x.detach(), [0])";
    EXPECT_THAT(message_of<ConfigError>([&] { gradient_and_mean(assigns, true); }),
                AllOf(HasSubstr("Replaces put another tensor in the place of buffer 'mean'"),
                      HasSubstr("in place, also in a scripted module (copy_())")));
    const std::string in_place = "self.mean.mul_(0.9).add_(torch.mean(x.detach(), [0]), alpha=0.1)";
    EXPECT_TRUE(at::equal(gradient_and_mean(in_place, true), gradient_and_mean(in_place, false)));
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

// Only a part of their gradients would be there, or none.
TEST(ActivationCheckpointing, GradientsOfChosenParametersInsideAreRefused) {
  isolated([] {
    torch::nn::Linear inside(24, 24), outside(24, 24);
    inside->to(at::kDouble);
    outside->to(at::kDouble);
    const ActivationCheckpointing recompute({inside.ptr()});
    const at::Tensor weight = inside->weight;
    const auto loss = [&] { return outside(call(inside, rows_of(0, 0))).square().mean(); };
    const auto backward_of = [](const at::Tensor& of, const at::Tensor& input) {
      of.backward({}, std::nullopt, false, std::vector{input});
    };
    EXPECT_THAT(message_of<ConfigError>([&] { backward_of(loss(), weight); }),
                HasSubstr("through a module that is recomputed"));
    EXPECT_THROW(backward_of(loss() + weight.square().sum(), weight), ConfigError);
    EXPECT_THROW(torch::autograd::grad({loss() + weight.square().sum()}, {weight}), ConfigError);
    EXPECT_THROW(torch::autograd::grad({loss()}, {weight}, {}, {}, false, true), ConfigError);
    EXPECT_FALSE(weight.grad().defined());
    backward_of(loss(), outside->weight);
    EXPECT_TRUE(outside->weight.grad().defined());
  });
}

// A parameter that the loss uses only inside is reached by the second run alone.
TEST(ActivationCheckpointing, HooksOfParametersRunOnceForEachGradient) {
  isolated([] {
    const StatisticsNet net;
    auto modules = blocks_of(net);
    modules.push_back(net->first->spectral.ptr());
    modules.push_back(net.ptr());
    const ActivationCheckpointing recompute(modules);
    std::map<std::string, int> defined, all;
    for (const auto& item : net->named_parameters()) {
      item.value().register_hook([&, name = item.key()](const at::Tensor& gradient) {
        ++all[name];
        defined[name] += gradient.defined();
      });
    }
    const at::Tensor outside = net->second->norm->weight;
    (call(net, rows_of(0, 0)).square().mean() + outside.square().sum()).backward();
    for (const auto& item : net->named_parameters()) {
      const int once = item.value().is_same(outside) ? 2 : 1;
      EXPECT_EQ(all[item.key()], once) << item.key();
      EXPECT_EQ(defined[item.key()], once) << item.key();
    }
  });
}

// One that is computed from a tensor that the loss uses, too.
TEST(ActivationCheckpointing, AParameterThatIsNoLeaf) {
  struct Scaled : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x * weight; }
    at::Tensor weight;
  };
  isolated([] {
    const at::Tensor x = rows_of(0, 0);
    std::vector<at::Tensor> gradients;
    for (const bool is_recomputed : {false, true}) {
      const at::Tensor source = at::full({24}, 3, at::kDouble).set_requires_grad(true);
      const auto net = std::make_shared<Scaled>();
      net->weight = net->register_parameter("weight", source.square());
      std::optional<ActivationCheckpointing> recompute;
      if (is_recomputed) recompute.emplace(std::vector<std::shared_ptr<torch::nn::Module>>{net});
      (call(net, x).sum() + source.sum()).backward();
      gradients.push_back(source.grad());
    }
    EXPECT_TRUE(at::equal(gradients[0], gradients[1])) << gradients[0] - gradients[1];
  });
}

}  // namespace
}  // namespace lockstep::test

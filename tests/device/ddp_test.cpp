// Ddp on a device: what it gives on the CPU in the same group, with nothing over before it is
// waited for. Both compute with the CPU's kernels and add two numbers in the one order there is:
// the same bits.
#include "lockstep/parallel/ddp.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "device/training.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/zero_optimizer.h"

namespace lockstep::test {
namespace {

using parallel::DdpOptions;

TEST(DdpOnDevice, TwentyStepsAreThoseOfTheCpu) { expect_same_training(small_buckets); }

TEST(DdpOnDevice, ClippedGradientsToo) {
  expect_same_training(small_buckets, [](Mlp& net, Ddp& ddp, torch::optim::Optimizer& optimizer,
                                         const at::Tensor& batch) {
    ddp.zero_grad();
    net.forward(batch).square().mean().backward();
    (void)parallel::clip_grad_norm_(net.parameters(), 0.05);
    optimizer.step();
  });
}

TEST(DdpOnDevice, AccumulatedOnesToo) {
  expect_same_training(small_buckets, [](Mlp& net, Ddp& ddp, torch::optim::Optimizer& optimizer,
                                         const at::Tensor& batch) {
    ddp.zero_grad();
    {
      const auto hold = ddp.hold();
      net.forward(batch).square().mean().backward();
    }
    net.forward(batch * 2).square().mean().backward();
    optimizer.step();
  });
}

TEST(DdpOnDevice, CompressedOnesToo) {
  expect_same_training([] {
    return DdpOptions{.bucket_bytes = {100, 300},
                      .hook = std::make_shared<parallel::CastHook>(at::kBFloat16)};
  });
}

TEST(DdpOnDevice, ApproximatedOnesToo) {
  expect_same_training([] {
    return DdpOptions{.bucket_bytes = {100, 300},
                      .hook = std::make_shared<parallel::PowerSgd>(
                          parallel::PowerSgdOptions{.start_iteration = 2, .least_compression = 1})};
  });
}

TEST(DdpOnDevice, TheLargestOnesToo) {
  expect_same_training([] {
    return DdpOptions{
        .bucket_bytes = {100, 300},
        .hook = std::make_shared<parallel::TopK>(parallel::TopKOptions{.fraction = 0.1})};
  });
}

// Which on a device combines the ranks' statistics in another order.
TEST(DdpOnDevice, SynchronousNormalisationToo) {
  const auto trained = [](World& world, at::Device device) {
    torch::manual_seed(3);
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                              torch::nn::Linear(8, 3));
    EXPECT_EQ(convert_sync_batch_norm(*net, world.group()), 1u);
    net->to(device);
    Ddp ddp(*net, world.group(), small_buckets());
    torch::optim::SGD sgd(net->parameters(), 0.1);
    for (int i = 0; i < 5; ++i) {
      ddp.zero_grad();
      net->forward(input(world.rank(), i, 3 + world.rank()).to(device)).square().mean().backward();
      sgd.step();
    }
    auto state = parameters_on_cpu(*net);
    for (const auto& tensor : net->buffers()) state.push_back(tensor.cpu());
    return state;
  };
  expect_same_on_both(trained, /*ranks_over_ipc=*/2);
}

TEST(DdpOnDevice, ParametersOutOfUseKeepTheirValues) {
  expect_same_training(small_buckets, [](Mlp& net, Ddp& ddp, torch::optim::Optimizer& optimizer,
                                         const at::Tensor& batch) {
    ddp.zero_grad();
    net.first(batch).square().mean().backward();
    EXPECT_FALSE(net.third->weight.grad().defined());
    optimizer.step();
  });
}

TEST(DdpOnDevice, AScaledLossToo) {
  expect_same_on_both([](World& world, at::Device device) {
    GradScaler scaler(world.group());
    return trained_mlp(
        world, device, small_buckets(),
        [&](Mlp& net, Ddp& ddp, torch::optim::Optimizer& optimizer, const at::Tensor& batch) {
          ddp.zero_grad();
          scaler.scale(net.forward(batch).square().mean()).backward();
          scaler.step(optimizer);
          scaler.update();
        });
  });
}

// The first buckets are under way while backward still computes, and none waits for them.
TEST(DdpOnDevice, CommunicationOverlapsBackward) {
  spawn_on_device(2, [](World& world) {
    Mlp net;
    net.to(world.device());
    Ddp ddp(net, world.group(), small_buckets());
    fake::shut_gate();
    int under_way = -1;
    net.first->weight.register_hook([&](const at::Tensor&) { under_way = fake::held_back(); });
    net.forward(input(world.rank()).to(world.device())).square().mean().backward();
    EXPECT_GE(under_way, 1);
    std::vector<at::Tensor> got;
    for (const auto& gradient : gradients(net)) got.push_back(gradient.cpu());
    expect_equal(got, average_gradients(2, make_mlp, square_loss_of_mlp));
  });
}

TEST(DdpOnDevice, StateAndBuffersStartAsRankZeros) {
  on_both(2, [](World& world) {
    Mlp net(world.rank() + 7);
    net.register_buffer("count", at::full({3}, 40 + world.rank(), at::kLong));
    net.to(world.device());
    Ddp ddp(net, world.group());
    Mlp first(7);
    for (size_t i = 0; i < 6; ++i)
      EXPECT_TRUE(at::equal(net.parameters()[i].cpu(), first.parameters()[i]));
    EXPECT_TRUE(at::equal(net.buffers()[0].cpu(), at::full({3}, 40, at::kLong)));
  });
}

TEST(DdpOnDevice, ADividedOptimizerGivesTheSame) {
  on_both(2, [](World& world) {
    const auto trained = [&](bool divided) {
      Mlp net;
      net.to(world.device());
      Ddp ddp(net, world.group());
      const auto make = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
        return std::make_unique<torch::optim::Adam>(std::move(groups),
                                                    torch::optim::AdamOptions(1e-2));
      };
      std::unique_ptr<torch::optim::Optimizer> whole =
          make({torch::optim::OptimizerParamGroup(net.parameters())});
      std::unique_ptr<ZeroOptimizer> zero;
      if (divided) zero = std::make_unique<ZeroOptimizer>(net.parameters(), world.group(), make);
      for (int i = 0; i < 5; ++i) {
        ddp.zero_grad();
        net.forward(input(world.rank(), i).to(world.device())).square().mean().backward();
        if (divided) {
          zero->step();
        } else {
          whole->step();
        }
      }
      std::vector<at::Tensor> result;
      for (const auto& parameter : net.parameters()) result.push_back(parameter.detach().cpu());
      return result;
    };
    const auto whole = trained(false);
    fake::shut_gate();
    expect_equal(trained(true), whole);
  });
}

// Parameters of two dtypes, which the kernels take apart, and a step that a part of them skips.
TEST(DdpOnDevice, FusedOptimizersHaveTheBitsOfTheCpu) {
  const auto trained = [](const auto& make) {
    return [make](World& world, at::Device device) {
      Mlp net;
      net.second->to(at::kDouble);
      net.to(device);
      Ddp ddp(net, world.group(), small_buckets());
      const auto optimizer = make(net.parameters());
      for (int i = 0; i < 6; ++i) {
        ddp.zero_grad();
        const at::Tensor first = torch::tanh(net.first(input(world.rank(), i).to(device)));
        const at::Tensor out = i == 2 ? first : net.second(first.to(at::kDouble));
        out.square().mean().backward();
        optimizer->step();
      }
      return parameters_on_cpu(net);
    };
  };
  using torch::optim::AdamWOptions, torch::optim::AdamOptions, torch::optim::SGDOptions;
  // With amsgrad the CPU takes the same kernel as the device.
  expect_same_on_both(trained([](auto parameters) {
    return std::make_unique<FusedAdamW>(parameters, AdamWOptions(0.1).amsgrad(true));
  }));
  expect_same_on_both(trained([](auto parameters) {
    return std::make_unique<FusedAdam>(parameters, AdamOptions(0.1).amsgrad(true));
  }));
  expect_same_on_both(trained([](auto parameters) {
    return std::make_unique<FusedSGD>(parameters, SGDOptions(0.1).momentum(0.9));
  }));
}

TEST(DdpOnDevice, ParametersOnTheCpuAreRefused) {
  spawn_on_device(2, [](World& world) {
    Mlp net;
    net.to(world.device());
    net.second->to(at::kCPU);
    EXPECT_THAT(
        message_of([&] { Ddp ddp(net, world.group()); }),
        testing::HasSubstr("'second.weight' is on cpu but the group communicates on fake:"));
  });
}

}  // namespace
}  // namespace lockstep::test

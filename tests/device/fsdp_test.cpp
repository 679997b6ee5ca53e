// Fsdp on a device: the bits of the CPU.
#include "lockstep/parallel/fsdp.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "device/training.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/grad_scaler.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

struct CalledImpl : torch::nn::Module {
  CalledImpl() {
    torch::manual_seed(2);
    torch::nn::ModuleList list;
    for (int i = 0; i < 3; ++i) {
      layers.emplace_back(6, 6);
      list->push_back(layers.back());
    }
    register_module("layers", list);
    last = register_module("last", torch::nn::Linear(6, 2));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(call(layer, x));
    return last(x);
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Called);

Training trained(FsdpOptions options) {
  return [=](World& world, at::Device device) {
    Called net;
    net->to(device);
    FsdpOptions with = options;
    for (const auto& layer : net->layers) with.units.push_back(layer.ptr());
    Fsdp fsdp(net, world.group(), with);
    torch::optim::SGD sgd(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int i = 0; i < 6; ++i) {
      fsdp.zero_grad();
      const at::Tensor x = input(world.rank(), i).to(device);
      {
        const auto hold = fsdp.hold();
        call(net, x).abs().mean().backward();
      }
      call(net, x).square().mean().backward();
      fsdp.clip_grad_norm_(0.5);
      sgd.step();
      const at::NoGradGuard no_grad;
      call(net, x);
    }
    fsdp.unshard();
    return parameters_on_cpu(*net);
  };
}

TEST(FsdpOnDevice, HasTheBitsOfTheCpu) {
  expect_same_on_both(trained({}));
  expect_same_on_both(trained({.sharding = parallel::Sharding::Gradients}));
  expect_same_on_both(
      trained({.backward_prefetch = parallel::BackwardPrefetch::After, .forward_prefetch = true}));
}

// Shards in the host's memory, or in files of a folder.
std::vector<FsdpOptions> offloaded(const Folder& folder) {
  return {{.offload = Offload::Cpu},
          {.sharding = parallel::Sharding::Gradients, .offload = Offload::Cpu},
          {.sharding = parallel::Sharding::None, .offload = Offload::Cpu},
          {.offload = Offload::File, .offload_folder = folder.path()}};
}

TEST(FsdpOnDevice, HasTheBitsOfTheCpuWithOffloadedShards) {
  const Folder folder;
  for (const auto& options : offloaded(folder)) expect_same_on_both(trained(options));
}

// Gradients come to where the shards are, in a narrower dtype, too, and are added to those of the
// backward before; the scaler's factor is where the loss is.
TEST(FsdpOnDevice, ScalesGradientsOfOffloadedShards) {
  const Training training = [](World& world, at::Device device) {
    Called net;
    net->to(device);
    Fsdp fsdp(net, world.group(),
              {.units = {net->layers[0].ptr(), net->layers[1].ptr()},
               .offload = Offload::Cpu,
               .reduce_dtype = at::kBFloat16});
    FusedAdamW adam(fsdp.parameters(), torch::optim::AdamWOptions(0.1));
    GradScaler scaler(world.group());
    for (int i = 0; i < 4; ++i) {
      fsdp.zero_grad();
      for (int part = 0; part < 2; ++part) {
        const at::Tensor x = input(world.rank(), 2 * i + part).to(device);
        scaler.scale(call(net, x).square().mean()).backward();
      }
      scaler.step(adam);
      scaler.update();
    }
    fsdp.unshard();
    return parameters_on_cpu(*net);
  };
  expect_same_on_both(training);
}

// The device comes late to the copy that a gather begins with.
TEST(FsdpOnDevice, HasReadOffloadedShardsWhenUnshardReturns) {
  spawn_on_device(2, [](World& world) {
    Called net;
    net->to(world.device());
    const auto values = parameters_on_cpu(*net);
    Fsdp fsdp(net, world.group(), {.offload = Offload::Cpu});
    fake::enqueue(fake::current_stream(),
                  [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
    fsdp.unshard();
    const at::NoGradGuard no_grad;
    for (auto& leaf : fsdp.parameters()) leaf.zero_();
    expect_equal(parameters_on_cpu(*net), values);
  });
}

TEST(FsdpOnDevice, RefusesAModuleThatHasBeenMoved) {
  spawn_on_device(2, [](World& world) {
    Called net;
    net->to(world.device());
    Fsdp fsdp(net, world.group());
    fsdp.unshard();
    if (world.rank() == 1) net->to(at::kCPU);
    const at::Tensor x = input(world.rank(), 0).to(net->last->weight.device());
    EXPECT_THAT(message_of<ConfigError>([&] { call(net, x).sum().backward(); }),
                testing::HasSubstr("converted"));
  });
}

TEST(FsdpOnDevice, KeepsNothingOfOffloadedShardsOnTheDevice) {
  const auto taken = [](World& world, const FsdpOptions& options) {
    const int64_t before = fake::memory_in_use();
    Called net;
    net->to(world.device());
    Fsdp fsdp(net, world.group(), options);
    torch::optim::SGD sgd(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int i = 0; i < 2; ++i) {
      call(net, input(world.rank(), i).to(world.device())).square().mean().backward();
      sgd.step();
    }
    for (const auto& leaf : fsdp.parameters()) {
      EXPECT_EQ(leaf.is_cpu(), options.offload != Offload::None);
      EXPECT_EQ(leaf.grad().device(), leaf.device());
    }
    return fake::memory_in_use() - before;
  };
  const Folder folder;
  spawn_on_device(1, [&](World& world) {
    const int64_t usual = taken(world, {}), parameters = 4 * (3 * (6 * 6 + 6) + 6 * 2 + 2);
    for (const auto& options : offloaded(folder)) {
      // Themselves, their gradients and the momentum; elements between them count, too.
      EXPECT_LE(taken(world, options), usual - 3 * parameters);
    }
  });
}

}  // namespace
}  // namespace lockstep::test

// Training on a fake device and on the CPU, in one group.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "device/cuda_ipc/on_ipc.h"
#include "device/on_device.h"
#include "parallel/reference.h"

namespace lockstep::test {

// What a training on `device` ends with, on the CPU.
using Training = std::function<std::vector<at::Tensor>(World& world, at::Device device)>;
using Step =
    std::function<void(Mlp& net, Ddp& ddp, torch::optim::Optimizer& sgd, const at::Tensor& batch)>;

inline parallel::DdpOptions small_buckets() { return {.bucket_bytes = {100, 300}}; }

inline std::vector<at::Tensor> parameters_on_cpu(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : module.parameters()) all.push_back(parameter.detach().cpu());
  return all;
}

// Both devices compute with the CPU's kernels: the same bits, whether the device computes at once
// or later.
inline void expect_same_on_device(World& world, const Training& trained) {
  const auto here = trained(world, at::kCPU);
  expect_equal(trained(world, world.device()), here);
  fake::shut_gate();
  expect_equal(trained(world, world.device()), here);
}

// Over cuda_ipc, on one device.
inline void expect_same_over_ipc(int ranks, const Training& trained) {
  setenv("FAKE_DEVICES", "1", 1);
  spawn_on_ipc(ranks, [&](World& world) { expect_same_on_device(world, trained); });
  unsetenv("FAKE_DEVICES");
}

// Over nccl and over cuda_ipc.
inline void on_both(int ranks, const std::function<void(World&)>& body) {
  spawn_on_device(ranks, body);
  spawn_on_ipc(ranks, body);
}

// Over nccl two ranks add two numbers in the one order there is.
inline void expect_same_on_both(const Training& trained, int ranks_over_ipc = 3) {
  spawn_on_device(2, [&](World& world) { expect_same_on_device(world, trained); });
  expect_same_over_ipc(ranks_over_ipc, trained);
}

inline void plain_step(Mlp& net, Ddp& ddp, torch::optim::Optimizer& sgd, const at::Tensor& batch) {
  ddp.zero_grad();
  net.forward(batch).square().mean().backward();
  sgd.step();
}

// Twenty steps of an Mlp.
inline std::vector<at::Tensor> trained_mlp(World& world, at::Device device,
                                           const parallel::DdpOptions& options, const Step& step) {
  Mlp net(world.rank());
  net.to(device);
  Ddp ddp(net, world.group(), options);
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int i = 0; i < 20; ++i) step(net, ddp, sgd, input(world.rank(), i).to(device));
  for (const auto& parameter : net.parameters()) EXPECT_EQ(parameter.device(), device);
  return parameters_on_cpu(net);
}

inline void expect_same_training(const std::function<parallel::DdpOptions()>& options,
                                 const Step& step = plain_step) {
  expect_same_on_both(
      [&](World& world, at::Device device) { return trained_mlp(world, device, options(), step); });
}

}  // namespace lockstep::test

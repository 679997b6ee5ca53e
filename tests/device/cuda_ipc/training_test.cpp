// Training over cuda_ipc: the bits of the CPU in the same group, for any number of ranks, also with
// several on one device.
#include "device/training.h"

#include <torch/torch.h>

#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fsdp.h"

namespace lockstep::test {
namespace {

TEST(CudaIpcTraining, TwentyStepsOfDdpAreThoseOfTheCpu) {
  for (const int ranks : {2, 3, 4}) {
    expect_same_over_ipc(ranks, [](World& world, at::Device device) {
      return trained_mlp(world, device, small_buckets(), plain_step);
    });
  }
}

// With the gradients of each rank's batch from a plain module, averaged in the tree.
TEST(CudaIpcTraining, GradientsAreThoseOfOneProcess) {
  spawn_on_ipc(3, [](World& world) {
    Mlp net;
    net.to(world.device());
    Ddp ddp(net, world.group(), small_buckets());
    fake::shut_gate();
    net.forward(input(world.rank()).to(world.device())).square().mean().backward();
    std::vector<at::Tensor> got;
    for (const auto& gradient : gradients(net)) got.push_back(gradient.cpu());
    expect_equal(got, average_gradients(3, make_mlp, square_loss_of_mlp));
  });
}

TEST(CudaIpcTraining, ShardedParametersToo) {
  expect_same_over_ipc(3, [](World& world, at::Device device) {
    Mlp net;
    net.to(device);
    Fsdp fsdp(net, world.group());
    torch::optim::SGD sgd(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int i = 0; i < 6; ++i) {
      fsdp.zero_grad();
      call(net, input(world.rank(), i).to(device)).square().mean().backward();
      fsdp.clip_grad_norm_(0.5);
      sgd.step();
    }
    fsdp.unshard();
    return parameters_on_cpu(net);
  });
}

}  // namespace
}  // namespace lockstep::test

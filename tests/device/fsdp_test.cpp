// Fsdp on a device: the bits of the CPU.
#include "lockstep/parallel/fsdp.h"

#include "device/training.h"
#include "lockstep/parallel/call.h"

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

}  // namespace
}  // namespace lockstep::test

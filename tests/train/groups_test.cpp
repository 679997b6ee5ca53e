// TrainerOptions::groups.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "support/spawn.h"
#include "train/net.h"

namespace lockstep::test {
namespace {

using train::TrainerOptions;

struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    torch::manual_seed(1);
    first = register_module("first", torch::nn::Linear(6, 6));
    tied = register_parameter("tied", first->weight);
    last = register_module("last", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x)).matmul(tied)); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  at::Tensor tied;
};
TORCH_MODULE(TiedNet);

at::Tensor trained(World& world, TrainerOptions options) {
  TiedNet net;
  const auto samples = train_samples(60);
  train::Trainer trainer(world, net, train::cross_entropy(), samples, std::move(options));
  trainer.run();
  if (trainer.fsdp() != nullptr) trainer.fsdp()->unshard();
  return flat(*net).clone();
}

// module.parameters() has a tied parameter under each of its names, and libtorch's optimizers step
// what they are given twice, twice.
TEST(Groups, ATiedParameterIsSteppedOnce) {
  const std::vector<std::function<void(TrainerOptions&)>> ways = {
      [](TrainerOptions&) {}, [](TrainerOptions& options) { options.zero = true; },
      [](TrainerOptions& options) { options.fsdp = divided(Division::Shared); }};
  spawn(2, [&](World& world) {
    for (const auto& way : ways) {
      TrainerOptions options = train_options({});
      options.optimizer =
          train::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9));
      way(options);
      const at::Tensor expected = trained(world, options);
      options.groups = [](torch::nn::Module& module) {
        return std::vector{torch::optim::OptimizerParamGroup(module.parameters())};
      };
      EXPECT_TRUE(at::equal(trained(world, options), expected));
    }
  });
}

}  // namespace
}  // namespace lockstep::test

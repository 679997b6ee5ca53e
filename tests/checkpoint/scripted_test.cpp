// Scripted modules: saved, restored and written as modules of torch::nn are.
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/interchange.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/stateful.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

// Its optimizer's state goes by the names of its parameters. Files of other programs, too.
TEST(ScriptedModules, AreTrackedLoadedAndWritten) {
  isolated([] {
    const auto make = [] {
      torch::jit::Module inner("Inner"), net("Outer");
      torch::manual_seed(0);
      inner.register_parameter("weight", torch::randn({3, 2}).requires_grad_(), false);
      inner.define("def forward(self, x):\n  return torch.mm(x, self.weight)\n");
      net.register_module("inner", inner);
      net.register_buffer("offset", torch::zeros({2}));
      net.define("def forward(self, x):\n  return self.inner.forward(x) + self.offset\n");
      return net;
    };
    const auto train = [](torch::jit::Module& net, torch::optim::Optimizer& optimizer) {
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        net.forward({torch::ones({4, 3})}).toTensor().square().sum().backward();
        optimizer.step();
        net.attr("offset").toTensor().add_(1);
      }
    };
    const auto parameters = [](const torch::jit::Module& net) {
      std::vector<at::Tensor> all;
      for (const auto& parameter : net.parameters()) all.push_back(parameter);
      return all;
    };
    const auto expect_same = [](const torch::jit::Module& one, const torch::jit::Module& other) {
      EXPECT_TRUE(at::equal(one.attr("inner").toModule().attr("weight").toTensor(),
                            other.attr("inner").toModule().attr("weight").toTensor()));
      EXPECT_TRUE(at::equal(one.attr("offset").toTensor(), other.attr("offset").toTensor()));
    };
    const Folder folder;
    auto net = make();
    FusedAdam adam(parameters(net), torch::optim::AdamOptions(0.1));
    train(net, adam);
    {
      Checkpointer checkpoints(World::solo(), folder.path());
      checkpoints.track("net", net);
      checkpoints.track("adam", adam);
      checkpoints.save(2);
    }
    auto other = make();
    FusedAdam again(parameters(other), torch::optim::AdamOptions(0.1));
    Checkpointer checkpoints(World::solo(), folder.path());
    checkpoints.track("net", other);
    checkpoints.track("adam", again);
    checkpoints.restore_latest();
    expect_same(net, other);
    train(net, adam);
    train(other, again);
    expect_same(net, other);

    const std::string file = folder.path() + "/net.safetensors";
    save_safetensors(net, file);
    EXPECT_EQ(read_tensors(file).count("inner.weight"), 1);
    auto third = make();
    load_module(third, file);
    expect_same(net, third);
  });
}

}  // namespace
}  // namespace lockstep::test

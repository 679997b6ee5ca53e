// One copy of the parameters for all ranks, and who writes to it between steps.
#include <gmock/gmock.h>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/interchange.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A linear layer of which the ranks share one copy.
struct Training {
  explicit Training(const World& world)
      : ddp(net, world.group()),
        sgd(net->parameters(), world.group(),
            zero<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), {.share_parameters = true}) {
    EXPECT_TRUE(sgd.shares_parameters());
  }
  void backward() {
    ddp.zero_grad();
    net->forward(at::ones({2, 4})).square().mean().backward();
  }
  torch::nn::Linear net = torch::nn::Linear(4, 3);
  Ddp ddp;
  ZeroOptimizer sgd;
};

// Sharpness-aware minimisation (Foret et al., ICLR 2021): each rank adds the same, and takes it
// away again.
TEST(ZeroShared, StepsBetweenWhichAllRanksWriteAreRefused) {
  spawn({"shm", 3}, [](World& world) {
    Training training(world);
    training.backward();
    training.sgd.step();
    const at::Tensor& weight = training.net->weight;
    const at::Tensor before = weight.detach().clone();
    training.backward();
    world.group().barrier().wait();
    {
      const at::NoGradGuard no_grad;
      weight.add_(weight.grad(), 0.05);
    }
    training.backward();
    {
      const at::NoGradGuard no_grad;
      weight.copy_(before);
    }
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(message_of<ConfigError>([&] { training.sgd.step(); }),
                  AllOf(HasSubstr("[zero] parameter 0 of shape [3, 4] was written to on 3 ranks"),
                        HasSubstr("Leave share_parameters out")));
    }
    EXPECT_TRUE(at::equal(weight, before));
  });
}

TEST(ZeroShared, OneRankMayWriteBetweenTwoSteps) {
  spawn({"shm", 3}, [](World& world) {
    Training training(world);
    const at::Tensor& weight = training.net->weight;
    for (int number = 0; number < 3; ++number) {
      training.backward();
      const at::Tensor before = weight.detach().clone(), gradient = weight.grad().clone();
      world.group().barrier().wait();
      if (world.rank() == number) {
        const at::NoGradGuard no_grad;
        weight.mul_(0.5);
      }
      training.sgd.step();
      EXPECT_TRUE(at::allclose(weight, before * 0.5 - gradient * 0.1));
    }
  });
}

// They read the same values, whose places are the same.
TEST(ZeroShared, AllRanksMayLoad) {
  const Folder folder;
  spawn({"shm", 2}, [&](World& world) {
    Training training(world);
    const at::Tensor& weight = training.net->weight;
    const auto step_from = [&](const at::Tensor& loaded) {
      EXPECT_TRUE(at::equal(weight, loaded));
      world.group().barrier().wait();
      training.backward();
      const at::Tensor gradient = weight.grad().clone();
      training.sgd.step();
      EXPECT_TRUE(at::allclose(weight, loaded - gradient * 0.1));
      world.group().barrier().wait();
    };
    const auto saved = weight.detach().clone();
    Checkpointer checkpoints(world, folder / "checkpoints");
    checkpoints.track("net", training.net);
    checkpoints.track("sgd", training.sgd);
    checkpoints.save(1);
    const std::string file = folder / "net.safetensors";
    if (world.is_main()) save_safetensors(training.net, file);
    step_from(saved);
    EXPECT_TRUE(checkpoints.restore_latest());
    step_from(saved);
    load_module(training.net, file);
    step_from(saved);
    // Rank 0's, which are the same.
    const at::Tensor before = weight.detach().clone();
    training.ddp.refresh();
    step_from(before);
    // Memory of its own on each rank.
    weight.set_data(saved.clone());
    {
      const at::NoGradGuard no_grad;
      weight.mul_(0.5);
    }
    step_from(saved * 0.5);
  });
}

}  // namespace
}  // namespace lockstep::test

// A learning-rate schedule, and a place in the data, that refuse what was saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/data/torch_sampler.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/stateful.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

TEST(Restore, AScheduleThatIsTooShortChangesNothing) {
  const Folder folder;
  isolated([&] {
    torch::nn::Linear net(1, 1);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1).momentum(0.9));
    const auto with = [&](int64_t steps, const auto& use) {
      LrScheduler schedule(sgd, one_cycle_lr({.steps = steps}));
      Checkpointer checkpoints(Group(), folder / "saved");
      checkpoints.track("net", net);
      checkpoints.track("schedule", schedule);
      use(checkpoints, schedule);
    };
    with(100, [](Checkpointer& checkpoints, LrScheduler& schedule) {
      for (int step = 0; step < 50; ++step) schedule.step();
      checkpoints.save(50);
    });
    {
      const at::NoGradGuard no_grad;
      net->weight.fill_(123);
    }
    with(10, [&](Checkpointer& checkpoints, LrScheduler& schedule) {
      EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                  HasSubstr("step 50 of a schedule of 10"));
      EXPECT_EQ(net->weight.item<float>(), 123);
      EXPECT_EQ(schedule.state().step, 0);
    });
    Checkpointer other(Group(), folder / "saved");
    torch::nn::Linear more(1, 1);
    other.track("more", more);
    other.restore_latest({.allow_missing = {"more"}, .allow_unexpected = {"net", "schedule"}});
  });
}

// Only one rank's data differ: the other's numbers and weights stay, too.
TEST(Restore, APlaceInOtherDataOfOneRankChangesNothing) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const data::TensorDataset all(torch::arange(40), torch::arange(40));
    const data::TensorDataset fewer(torch::arange(39), torch::arange(39));
    const auto with = [&](const data::TensorDataset& set, const auto& use) {
      Loader loader(set, world, {.batch_size = 4});
      data::DistributedSampler sampler(set.size(), Shard{world.rank(), 2});
      TorchSampler of_torch(set.size(), world);
      int64_t taken = 0;
      const auto track = [&](const std::string& kind, auto& checkpoints) {
        if (kind == "loader") checkpoints.track(kind, loader);
        if (kind == "sampler") checkpoints.track(kind, sampler);
        if (kind == "torch") checkpoints.track(kind, stateful(of_torch, taken));
      };
      auto epoch = loader.epoch(0);
      (void)epoch.begin();
      sampler.advance(4);
      of_torch.reset();
      (void)of_torch.next(4);
      taken = 1;
      for (const std::string kind : {"loader", "sampler", "torch"}) {
        int64_t steps = 1;
        at::Tensor weight = torch::ones({1});
        Checkpointer checkpoints(world, folder / kind);
        checkpoints.track("steps", steps);
        checkpoints.track("weight", weight);
        track(kind, checkpoints);
        use(checkpoints, steps, weight);
      }
    };
    with(all, [](Checkpointer& checkpoints, int64_t&, at::Tensor&) { checkpoints.save(1); });
    with(world.rank() == 0 ? all : fewer,
         [](Checkpointer& checkpoints, int64_t& steps, at::Tensor& weight) {
           steps = 7;
           weight.fill_(7);
           EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                       HasSubstr("[sampler] cannot resume: the state is of 40 samples"));
           EXPECT_EQ(steps, 7);
           EXPECT_EQ(weight.item<float>(), 7);
         });
  });
}

}  // namespace
}  // namespace lockstep::test

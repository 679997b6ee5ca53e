// A learning-rate schedule that refuses what was saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/checkpointer.h"
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

}  // namespace
}  // namespace lockstep::test

// A child by fork() of a rank that trains: what it has not is refused by name.
#include "support/fork.h"

#include <gmock/gmock.h>

#include <optional>

#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fsdp.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

const auto names_backward =
    ::testing::AllOf(::testing::HasSubstr("[comm] backward: the group belongs to process"),
                     ::testing::HasSubstr("fork()"));

TEST(TrainingInAChild, ADdpsBackwardIsRefused) {
  spawn(2, [](World& world) {
    Mlp net;
    std::optional<Ddp> ddp(std::in_place, net, world);
    const auto loss_of = [&] { return square_loss(net, world.rank()); };
    loss_of().backward();
    const at::Tensor loss = loss_of();
    in_a_child([&] {
      EXPECT_THAT(message_of<ConfigError>([&] { loss_of().backward(); }), names_backward);
      {
        const auto hold = ddp->hold();
        EXPECT_THAT(message_of<ConfigError>([&] { loss.backward(); }), names_backward);
      }
      ddp.reset();
    });
    loss.backward();
  });
}

TEST(TrainingInAChild, AnFsdpsBackwardIsRefused) {
  for (const bool shares : {true, false}) {
    spawn(2, [&](World& world) {
      Mlp net;
      std::optional<Fsdp> fsdp(std::in_place, net, world, FsdpOptions{.share_memory = shares});
      const auto loss_of = [&] { return lockstep::call(net, input(world.rank())).square().mean(); };
      loss_of().backward();
      const at::Tensor loss = loss_of();
      in_a_child([&] {
        EXPECT_THAT(message_of<ConfigError>([&] { loss.backward(); }), names_backward);
        fsdp.reset();
      });
      loss.backward();
    });
  }
}

}  // namespace
}  // namespace lockstep::test

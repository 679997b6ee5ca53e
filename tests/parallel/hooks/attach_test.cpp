// Which Ddp a hook is attached to.
#include <gmock/gmock.h>

#include <memory>
#include <optional>
#include <stdexcept>

#include "lockstep/parallel/hooks.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

TEST(HookAttach, WhatItThrowsOnOneRankIsThrownOnAll) {
  struct Picky : CastHook {
    explicit Picky(int r) : CastHook(at::kBFloat16), rank(r) {}
    void attach(const std::map<std::string, at::Tensor>&) override {
      if (rank == 1) throw std::runtime_error("not these parameters");
    }
    int rank;
  };
  spawn(2, [](World& world) {
    Mlp net;
    EXPECT_THAT(message_of<ConfigError>([&] {
                  Ddp(net, world.group(), {.hook = std::make_shared<Picky>(world.rank())});
                }),
                HasSubstr("not these parameters (rank 1)"));
    const Ddp ddp(net, world.group());  // no rank waits in a collective any more
  });
}

// Residuals of one model would be added to another's gradients.
TEST(HookAttach, OfOneDdpAtATime) {
  spawn(2, [](World& world) {
    const auto hook = std::make_shared<PowerSgd>(
        PowerSgdOptions{.rank = 1, .start_iteration = 1, .least_compression = 1.1});
    Mlp net, other;
    std::optional<Ddp> ddp(std::in_place, net, world.group(), DdpOptions{.hook = hook});
    const auto second = [&] { Ddp(other, world.group(), {.hook = hook}); };
    EXPECT_THAT(message_of<ConfigError>(second),
                HasSubstr("the hook power_sgd belongs to another Ddp"));
    Ddp moved = std::move(*ddp);
    ddp.reset();
    EXPECT_THAT(message_of<ConfigError>(second), HasSubstr("belongs to another Ddp"));
    moved.refresh();
  });
  spawn(2, [](World& world) {
    const auto hook = std::make_shared<TopK>(TopKOptions{.fraction = 0.1});
    Mlp net, other;
    { const Ddp ddp(net, world.group(), {.hook = hook}); }
    const Ddp ddp(other, world.group(), {.hook = hook});
  });
}

// Rank 2 has given it to none.
TEST(HookAttach, OfOneDdpAtATimeOnAnyGroup) {
  spawn(3, [](World& world) {
    const Group part = world.group().split(world.rank() == 2 ? 1 : 0);
    const auto hook = std::make_shared<TopK>(TopKOptions{.fraction = 0.1});
    Mlp net, other;
    std::optional<Ddp> ddp(std::in_place, net, part, DdpOptions{.hook = hook});
    const auto second = [&] { Ddp(other, world.group(), {.hook = hook}); };
    EXPECT_THAT(message_of<ConfigError>(second),
                HasSubstr("rank 0: the hook top_k belongs to another Ddp"));
    ddp.reset();
    second();
  });
}

}  // namespace
}  // namespace lockstep::test

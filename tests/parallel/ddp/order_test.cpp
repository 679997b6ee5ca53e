// Ranks whose backward() do not belong together are told so at the first collective.
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DdpOrder, EqualModelsInOppositeOrderAreTold) {
  spawn(2, [](World& world) {
    Mlp one(1), two(2);
    Ddp first(one, world), second(two, world);
    const auto message = message_of<CommError>([&] {
      for (const int turn : {0, 1}) {
        square_loss(turn == world.rank() ? one : two, world.rank()).backward();
      }
    });
    EXPECT_THAT(message, AllOf(HasSubstr("Ddp 1, pass 1"), HasSubstr("Ddp 2, pass 1")));
  });
}

// It averaged its next batch with the batch that the others had before.
TEST(DdpOrder, ARankThatSkipsABatchIsTold) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    int done = 0;
    const auto message = message_of<CommError>([&] {
      for (int step = 0; step < 5; ++step) {
        ddp.zero_grad();
        const auto loss = square_loss(net, world.rank(), step);
        if (world.rank() == 1 && step == 2) continue;
        loss.backward();
        ++done;
      }
    });
    EXPECT_EQ(done, 2);
    EXPECT_THAT(message, AllOf(HasSubstr("pass 3"), HasSubstr("pass 4"), HasSubstr("see Join")));
  });
}

// Of optimizer.zero_grad() nothing can be counted. Its next batch goes with the others' earlier
// one, and all ranks still make the same steps, until it has none left.
TEST(DdpOrder, ARankThatSkipsABatchWithoutDdpsZeroGradStaysAlikeAndIsMissedAtTheEnd) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world, {.check_same_every = 1});
    torch::optim::SGD sgd(net.parameters(), 0.1);
    const auto message = message_of<CommError>([&] {
      for (int step = 0; step < 4; ++step) {
        sgd.zero_grad();
        const auto loss = square_loss(net, world.rank(), step);
        if (world.rank() == 1 && step == 1) continue;
        loss.backward();
        sgd.step();
      }
    });
    EXPECT_EQ(ddp.log().pass_count, 3);
    EXPECT_THAT(message, HasSubstr(world.rank() == 0 ? "see Join, any_rank" : "nothing"));
  });
}

TEST(DdpOrder, ZeroGradMayBeCalledMoreOftenOnAllRanks) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    for (int step = 0; step < 4; ++step) {
      for (int times = 0; times <= step; ++times) ddp.zero_grad();
      square_loss(net, world.rank()).backward();
    }
    EXPECT_EQ(ddp.log().pass_count, 4);
  });
}

// Rank 1 leaves the pass; rank 0 waits for it and meets the next one.
TEST(DdpOrder, ABackwardThatThrewOnOneRankIsToldByItsNext) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    torch::optim::SGD sgd(net.parameters(), 0.1);
    const auto message = message_of<CommError>([&] {
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        const bool throws = world.rank() == 1 && step == 1;
        auto loss = square_loss(net, world.rank(), step);
        const auto handle = net.first->weight.register_hook([&](const at::Tensor& gradient) {
          if (throws) throw std::runtime_error("mine");
          return gradient;
        });
        try {
          loss.backward();
        } catch (const std::runtime_error& error) {
          if (std::string(error.what()) != "mine") throw;
        }
        net.first->weight.remove_hook(handle);
      }
    });
    EXPECT_THAT(message, AllOf(HasSubstr("pass 2"), HasSubstr("pass 3")));
  });
}

}  // namespace
}  // namespace lockstep::test

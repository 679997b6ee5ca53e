// What is particular to gloo; tests/comm/group/collectives_test.cpp runs every collective on it.
#include <torch/torch.h>

#include <chrono>
#include <limits>
#include <string>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

const SpawnOptions kGloo{.backend = "gloo"};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(GlooCollectives, SaysWhatItIs) {
  spawn(
      2,
      [](World& world) {
        EXPECT_EQ(world.group().backend(), "gloo");
        EXPECT_TRUE(world.group().deterministic());
      },
      kGloo);
}

TEST(GlooCollectives, MinAndMaxKeepANanOfAnyRank) {
  spawn(
      3,
      [](World& world) {
        for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
          for (int owner = 0; owner < 3; ++owner) {
            for (const auto op : {ReduceOp::Min, ReduceOp::Max}) {
              at::Tensor t =
                  at::tensor({world.rank() == owner ? kNan : 1.f, -1.f - world.rank()}).to(dtype);
              world.group().all_reduce(t, op).wait();
              EXPECT_TRUE(t[0].isnan().item<bool>()) << dtype << " NaN on rank " << owner;
              EXPECT_EQ(t[1].item<float>(), op == ReduceOp::Min ? -3.f : -1.f) << dtype;
            }
          }
        }
      },
      kGloo);
}

TEST(GlooCollectives, MinAndMaxOrderNumbersOfBothSigns) {
  spawn(
      2,
      [](World& world) {
        const float huge = std::numeric_limits<float>::infinity();
        const at::Tensor mine = world.rank() == 0 ? at::tensor({-2.f, 0.5f, -huge, huge, 1e-45f})
                                                  : at::tensor({3.f, 0.25f, 1.f, -1.f, -1e-45f});
        at::Tensor low = mine.clone(), high = mine.clone();
        world.group().all_reduce(low, ReduceOp::Min).wait();
        world.group().all_reduce(high, ReduceOp::Max).wait();
        EXPECT_TRUE(low.equal(at::tensor({-2.f, 0.25f, -huge, -1.f, -1e-45f}))) << low;
        EXPECT_TRUE(high.equal(at::tensor({3.f, 0.5f, 1.f, huge, 1e-45f}))) << high;
      },
      kGloo);
}

TEST(GlooCollectives, Int16WrapsThoughGlooHasNone) {
  spawn(
      2,
      [](World& world) {
        at::Tensor t = at::full({3}, 30000, at::kShort);
        world.group().all_reduce(t).wait();
        EXPECT_EQ(t[2].item<int>(), 60000 - 65536);
      },
      kGloo);
}

TEST(GlooCollectives, ReduceLeavesTheOthersTensorsAlone) {
  spawn(
      3,
      [](World& world) {
        at::Tensor t = at::full({5}, world.rank() + 1.f);
        world.group().reduce(t, 1).wait();
        EXPECT_EQ(t[4].item<float>(), world.rank() == 1 ? 6.f : world.rank() + 1.f);
      },
      kGloo);
}

TEST(GlooCollectives, NothingIsAMessageToo) {
  spawn(
      2,
      [](World& world) {
        const Group& group = world.group();
        at::Tensor none = at::empty({0});
        group.all_reduce(none).wait();
        group.broadcast(none).wait();
        if (world.rank() == 0) group.send(none, 1).wait();
        if (world.rank() == 1) group.recv(none, 0).wait();
        // Rank 1 gives nothing, rank 0 two elements.
        const at::Tensor mine = at::full({world.rank() == 0 ? 2 : 0}, 7.f);
        std::vector<at::Tensor> all{at::zeros({2}), at::zeros({0})};
        group.all_gather(all, mine).wait();
        EXPECT_EQ(all[0][1].item<float>(), 7.f);
        std::vector<at::Tensor> at_root;
        if (world.rank() == 0) at_root = {at::zeros({2}), at::zeros({0})};
        group.gather(at_root, mine).wait();
        group.all_reduce(at_root.empty() ? none : at_root[1]).wait();
      },
      kGloo);
}

TEST(GlooCollectives, ManyAtOnceFinishInAnyOrder) {
  spawn(
      2,
      [](World& world) {
        std::vector<at::Tensor> tensors;
        std::vector<comm::Work> works;
        for (int i = 0; i < 20; ++i) {
          tensors.push_back(at::full({i + 1}, static_cast<int64_t>(i)));
          works.push_back(world.group().all_reduce(tensors.back()));
        }
        for (int i = 19; i >= 0; --i) works[i].wait();
        for (int i = 0; i < 20; ++i) EXPECT_EQ(tensors[i][i].item<int64_t>(), 2 * i);
      },
      kGloo);
}

TEST(GlooCollectives, MessagesAreReceivedWhileOthersAreStillToCome) {
  spawn(
      2,
      [](World& world) {
        const Group& group = world.group();
        const int other = 1 - world.rank();
        at::Tensor first = at::zeros({4}), second = at::zeros({4});
        comm::Work late = group.recv(first, other, 1);
        group.send(at::full({4}, world.rank() + 10.f), other, 1).wait();
        late.wait();
        EXPECT_EQ(first[3].item<float>(), other + 10.f);
        if (world.rank() == 0) group.send(second, 1, 2).wait();
        if (world.rank() == 1) group.recv(second, 0, 2).wait();
      },
      kGloo);
}

TEST(GlooCollectives, AnUnfinishedReductionIsFinishedByTheNextCall) {
  spawn(
      2,
      [](World& world) {
        at::Tensor mean = at::full({3}, world.rank() * 4.f);
        { const comm::Work dropped = world.group().all_reduce(mean, ReduceOp::Average); }
        world.group().barrier().wait();
        EXPECT_EQ(mean[0].item<float>(), 2.f);
      },
      kGloo);
}

TEST(GlooCollectives, PartsOfAGroupWorkSideBySide) {
  spawn(
      4,
      [](World& world) {
        const Group half = world.group().split(world.rank() % 2, -world.rank());
        EXPECT_EQ(half.size(), 2);
        EXPECT_EQ(half.rank(), world.rank() < 2 ? 1 : 0);
        EXPECT_EQ(half.backend(), "gloo");
        at::Tensor t = at::full({2}, static_cast<float>(world.rank()));
        half.all_reduce(t).wait();
        EXPECT_EQ(t[0].item<float>(), world.rank() % 2 == 0 ? 2.f : 4.f);
        world.group().all_reduce(t).wait();
        EXPECT_EQ(t[0].item<float>(), 12.f);
      },
      kGloo);
}

// A rank that waits for a later call compares the ones before it with the others', too.
TEST(GlooCollectives, AnotherCallIsFoundWhereOneRankDoesNotWaitForItsOwn) {
  spawn(2,
        [](World& world) {
          const at::Tensor few = at::ones({4}), many = at::ones({6});
          const std::string said = message_of<CommError>([&] {
            if (world.rank() == 1) return world.group().all_reduce(many).wait();
            const auto first = world.group().all_reduce(few);
            world.group().all_reduce(many).wait();
          });
          EXPECT_NE(said.find("all_reduce #1"), std::string::npos) << said;
          EXPECT_NE(said.find("is not what the others called"), std::string::npos) << said;
        },
        {.backend = "gloo", .timeout = std::chrono::seconds(20)});
}

}  // namespace
}  // namespace lockstep::test

// Calls that say which object makes them and in which of its passes: ranks that have come apart are
// told.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::message_of;
using test::name_of;
using test::Ranks;
using test::spawn;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::string_view kAdvice = "or one rank ran out of batches: see Join";

class Context : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, Context,
                         testing::Values(Ranks{"shm", 2}, Ranks{"tcp", 2}, Ranks{"gloo", 2},
                                         Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

CallOptions bucket(uint32_t model, uint32_t pass) {
  return {.label = "bucket 0", .context = {"Ddp", model, pass}, .advice = kAdvice};
}

TEST_P(Context, RanksInDifferentPassesAreTold) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const uint32_t pass = group.rank() + 1 == group.size() ? 6 : 7;
    const std::string said = message_of<CommError>(
        [&] { group.all_reduce(at::ones({4}), ReduceOp::Sum, bucket(1, pass)).wait(); });
    EXPECT_THAT(said,
                AllOf(HasSubstr("bucket 0, Ddp 1, pass 7"), HasSubstr("bucket 0, Ddp 1, pass 6"),
                      HasSubstr(" (or one rank ran out of batches: see Join)")));
  });
}

TEST_P(Context, TwoCallersInOppositeOrderAreTold) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const uint32_t first = 1 + group.rank() % 2, second = 3 - first;
    const std::string said = message_of<CommError>([&] {
      at::Tensor gradients[] = {group.empty({4}), group.empty({4})};
      Work one = group.all_reduce(gradients[0], ReduceOp::Sum, bucket(first, 1));
      Work two = group.all_reduce(gradients[1], ReduceOp::Sum, bucket(second, 1));
      one.wait();
      two.wait();
    });
    EXPECT_THAT(said, AllOf(HasSubstr("Ddp 1, pass 1"), HasSubstr("Ddp 2, pass 1")));
  });
}

// The rank that makes the other call has no advice of its own.
TEST_P(Context, ACallThatIsNotOfThePassIsToldTheAdvice) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const std::string said = message_of<CommError>([&] {
      if (group.rank() + 1 == group.size()) {
        group.barrier().wait();
      } else {
        group.all_reduce(at::ones({4}), ReduceOp::Sum, bucket(1, 3)).wait();
      }
    });
    EXPECT_THAT(said,
                AllOf(HasSubstr("barrier #"), HasSubstr("Ddp 1, pass 3"), HasSubstr(kAdvice)));
  });
}

TEST_P(Context, AnAdviceOf127CharactersIsKept) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const std::string advice = std::string(126, 'x') + "!";
    at::Tensor sum = at::ones({group.rank() + 1 == group.size() ? 4 : 5});
    EXPECT_THAT(message_of<CommError>(
                    [&] { group.all_reduce(sum, ReduceOp::Sum, {.advice = advice}).wait(); }),
                HasSubstr(" (" + advice + ")"));
  });
}

TEST_P(Context, ARankThatHasEndedIsToldWithTheAdvice) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    if (group.rank() + 1 == group.size()) return;
    EXPECT_THAT(message_of<CommError>(
                    [&] { group.all_reduce(at::ones({4}), ReduceOp::Sum, bucket(2, 3)).wait(); }),
                AllOf(HasSubstr("Ddp 2, pass 3"), HasSubstr(kAdvice)));
  });
}

TEST_P(Context, RanksThatAgreeGoOn) {
  spawn(GetParam(), [](World& world) {
    const Group group = world.group();
    EXPECT_EQ(group.next_caller(), 1u);
    EXPECT_EQ(world.group().next_caller(), 2u);
    for (uint32_t pass = 1; pass <= 3; ++pass) {
      at::Tensor sum = at::ones({4});
      group.all_reduce(sum, ReduceOp::Sum, bucket(2, pass)).wait();
      EXPECT_TRUE(at::equal(sum, at::full({4}, float(group.size()))));
      group.broadcast(sum, 0, {.context = {"Ddp", 1}}).wait();
      group.barrier().wait();
    }
  });
}

}  // namespace
}  // namespace lockstep::comm

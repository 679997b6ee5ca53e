// Calls in which nothing moves, as of tensors without elements, against other calls in their place:
// every rank gets an error, over tcp and host-then-net long before the deadline.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <functional>

#include "lockstep/core/error.h"
#include "support/signal.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using std::chrono::steady_clock;
using testing::HasSubstr;
using namespace std::chrono_literals;
using Call = std::function<comm::Work(const Group&)>;

Call sum_of(int64_t count) {
  return [count](const Group& group) { return group.all_reduce(at::ones({count})); };
}
const Call kBarrier = [](const Group& group) { return group.barrier(); };
const Call kBroadcast = [](const Group& group) { return group.broadcast(at::ones({4})); };

// The first half of the ranks (the first host, where there are two) makes `call`, the others make
// the empty sum in its place.
struct Case {
  const char* name;
  Ranks ranks;
  Call call;
};

class WithoutElements : public testing::TestWithParam<Case> {
 protected:
  // The ranks of one half begin when those of the other have started their calls.
  static void run(bool empty_ones_begin) {
    const Case& test = GetParam();
    const Signal made;
    spawn(test.ranks, [&](World& world) {
      const Group& group = world.group();
      const int half = world.size() / 2;
      const bool is_empty = world.rank() >= half;
      const auto start = steady_clock::now();
      const std::string error = message_of<CommError>([&] {
        if (is_empty != empty_ones_begin) {
          for (int r = 0; r < half; ++r) made.wait();
        }
        comm::Work work = (is_empty ? sum_of(0) : test.call)(group);
        for (int r = 0; is_empty == empty_ones_begin && r < half; ++r) made.give();
        work.wait();
        group.barrier().wait();
        group.barrier().wait();
      });
      EXPECT_LT(steady_clock::now() - start, 20s);  // of a deadline of 60 s
      EXPECT_THAT(error, HasSubstr("float32 x 0"));
    });
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<std::pair<const char*, Call>> calls = {
      {"sum", sum_of(4)}, {"barrier", kBarrier}, {"broadcast", kBroadcast}};
  for (const Ranks& ranks : {Ranks{"tcp", 2}, Ranks{"auto", 4, {0, 0, 1, 1}}}) {
    for (const auto& [name, call] : calls) all.push_back({name, ranks, call});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(On, WithoutElements, testing::ValuesIn(cases()), [](const auto& test) {
  return test.param.ranks.name() + "_" + test.param.name;
});

// Its messages are matched by the number of the call: a barrier does not meet the one after it.
TEST(WithoutElementsOverGloo, AreCountedWithTheOtherCalls) {
  spawn(2,
        [](World& world) {
          const Group& group = world.group();
          const std::string error = message_of<CommError>([&] {
            if (world.rank() == 1) sum_of(0)(group).wait();
            group.barrier().wait();
          });
          EXPECT_THAT(error, HasSubstr(world.rank() == 0 ? "barrier #1" : "barrier #2"));
        },
        {.backend = "gloo", .timeout = 3s});
}

TEST_P(WithoutElements, AreComparedWithEarlierCalls) { run(false); }
TEST_P(WithoutElements, AreComparedWithLaterCalls) { run(true); }

}  // namespace
}  // namespace lockstep::test

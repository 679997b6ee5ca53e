// Outputs with gaps: those of one call that share elements are refused, those between each other's
// elements are not.
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
using testing::HasSubstr;

class Outputs : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, Outputs,
                         testing::Values(Ranks{"shm", 2}, Ranks{"tcp", 2}, Ranks{"gloo", 2}),
                         name_of);

TEST_P(Outputs, ThatShareElementsAreRefused) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const at::Tensor line = at::zeros({8}), matrix = at::zeros({4, 4}),
                     long_line = at::zeros({20000});
    const std::vector<std::vector<at::Tensor>> lists = {
        {line.slice(0, 0, 8, 2), line.slice(0, 0, 8, 2)},
        {line.slice(0, 0, 8, 2), line.slice(0, 4, 8, 1)},
        {matrix, matrix.select(1, 1)},
        {matrix.select(0, 1), matrix.select(1, 1)},
        {long_line.slice(0, 0, 20000, 2), long_line.slice(0, 0, 20000, 2)}};
    for (const auto& outputs : lists) {
      const at::Tensor input = at::ones({outputs[static_cast<size_t>(group.rank())].numel()});
      EXPECT_THAT(message_of<ConfigError>([&] { (void)group.all_gather(outputs, input); }),
                  HasSubstr("two outputs share memory: give each its own"));
    }
    group.barrier().wait();
  });
}

TEST_P(Outputs, BetweenEachOthersElementsAreFilled) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    for (const int64_t rows : {4, 40000}) {
      const at::Tensor matrix = at::zeros({rows, 3});
      group
          .all_gather({matrix.select(1, 0), matrix.select(1, 2)},
                      at::full({rows}, group.rank() + 1.f))
          .wait();
      for (const int column : {0, 1, 2}) {
        const float expected = column == 0 ? 1 : column == 1 ? 0 : 2;
        EXPECT_TRUE(at::equal(matrix.select(1, column), at::full({rows}, expected)));
      }
    }
  });
}

TEST_P(Outputs, WhoseOwnElementsShareMemoryAreRefused) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    // Offsets 0, 2, 4 and 4, 6, 8: as many places as elements, of which one is not reached.
    EXPECT_THAT(message_of<ConfigError>([&] {
                  (void)group.all_reduce(at::zeros({9}).as_strided({2, 3}, {4, 2}));
                }),
                HasSubstr("an output's elements share memory"));
    // 0, 3 and 2, 5 and 4, 7: steps that cross each other and never meet.
    const at::Tensor crossed = at::ones({8}).as_strided({3, 2}, {2, 3});
    group.all_reduce(crossed).wait();
    EXPECT_TRUE(at::equal(crossed, at::full({3, 2}, 2.f)));
  });
}

}  // namespace
}  // namespace lockstep::comm

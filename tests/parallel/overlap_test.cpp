#include "parallel/layout/overlap.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/parallel/deferred_init.h"
#include "support/spawn.h"

namespace lockstep::parallel {
namespace {

using ::testing::Eq;
using ::testing::Optional;
using ::testing::Pair;

TEST(Overlap, IsOfDifferentTensorsThatHaveElementsInCommon) {
  test::isolated([] {
    const at::Tensor a = at::zeros({4, 6}), b = at::zeros({24});
    EXPECT_THAT(first_overlap({a, b, a}, 3), Eq(std::nullopt));
    EXPECT_THAT(first_overlap({b, a, a.detach()}, 3), Optional(Pair(1, 2)));
    EXPECT_THAT(first_overlap({a.t().detach(), b, a}, 3), Optional(Pair(0, 2)));
    // Side by side, without elements, and one element in common.
    EXPECT_THAT(first_overlap({a.narrow(0, 2, 2), b, a.narrow(0, 0, 2)}, 3), Eq(std::nullopt));
    EXPECT_THAT(first_overlap({a, a.narrow(0, 2, 0)}, 2), Eq(std::nullopt));
    EXPECT_THAT(first_overlap({b.narrow(0, 0, 13), b.narrow(0, 12, 12)}, 2), Optional(Pair(0, 1)));
    // A small one within a large one, behind others that it does not touch.
    EXPECT_THAT(first_overlap({b.narrow(0, 20, 4), b, a}, 3), Optional(Pair(0, 1)));
    EXPECT_THAT(
        first_overlap({b.narrow(0, 0, 2), b.narrow(0, 2, 2), b.narrow(0, 4, 20), b.narrow(0, 9, 1)},
                      4),
        Optional(Pair(2, 3)));
    // Another storage over the same memory.
    const at::Tensor other = at::from_blob(a.mutable_data_ptr<float>() + 6, {6});
    EXPECT_THAT(first_overlap({a, other}, 2), Optional(Pair(0, 1)));
  });
}

TEST(Overlap, OfTensorsThatStayIsOfNoConcern) {
  test::isolated([] {
    const at::Tensor a = at::zeros({24}), b = at::zeros({24});
    EXPECT_THAT(first_overlap({b, a, a.detach()}, 1), Eq(std::nullopt));
    EXPECT_THAT(first_overlap({a, b, a.detach()}, 1), Optional(Pair(0, 2)));
    EXPECT_THAT(first_overlap({a.narrow(0, 9, 1), a.narrow(0, 0, 4), a.detach()}, 1),
                Optional(Pair(0, 2)));
  });
}

TEST(Overlap, OfTensorsWithoutMemoryIsInTheirStorage) {
  test::isolated([] {
    const auto nets = [] {
      const DeferredInit deferred;
      return std::vector<torch::nn::Linear>{torch::nn::Linear(40, 40), torch::nn::Linear(40, 40)};
    }();
    EXPECT_THAT(first_overlap({nets[0]->weight, nets[1]->weight, nets[0]->bias}, 3),
                Eq(std::nullopt));
    EXPECT_THAT(first_overlap({nets[0]->weight, nets[1]->weight, nets[0]->weight.detach()}, 3),
                Optional(Pair(0, 2)));
  });
}

}  // namespace
}  // namespace lockstep::parallel

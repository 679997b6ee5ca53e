#include "lockstep/checkpoint/box.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::test {
namespace {

using checkpoint::Box;
using checkpoint::boxes_of;
using checkpoint::elements;
using checkpoint::fault_of;
using checkpoint::intersection;
using checkpoint::Sizes;
using checkpoint::text_of;
using checkpoint::whole;

// Row-major numbers of the elements of a box, in order.
std::vector<int64_t> numbers(const Sizes& sizes, const Box& box) {
  std::vector<int64_t> all{0};
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t outer : all) {
      for (int64_t i = 0; i < box.size[d]; ++i)
        next.push_back(outer * sizes[d] + box.offset[d] + i);
    }
    all = std::move(next);
  }
  return all;
}

TEST(Box, EveryRangeOfEveryShapeIsFewBoxesInOrder) {
  for (const Sizes& sizes :
       {Sizes{}, {1}, {7}, {3, 4}, {1, 5}, {2, 1, 3}, {2, 3, 4}, {2, 2, 2, 3}}) {
    const int64_t count = elements(sizes);
    for (int64_t begin = 0; begin <= count; ++begin) {
      for (int64_t end = begin; end <= count; ++end) {
        std::vector<int64_t> got;
        const auto boxes = boxes_of(sizes, {begin, end});
        for (const auto& box : boxes) {
          for (const int64_t number : numbers(sizes, box)) got.push_back(number);
        }
        std::vector<int64_t> want(end - begin);
        for (int64_t i = begin; i < end; ++i) want[i - begin] = i;
        ASSERT_EQ(got, want) << text_of(whole(sizes)) << " from " << begin << " to " << end;
        ASSERT_LE(boxes.size(), std::max<size_t>(1, 2 * sizes.size() - !sizes.empty()));
      }
    }
    EXPECT_EQ(boxes_of(sizes, {0, count}), std::vector<Box>{whole(sizes)});
  }
}

TEST(Box, OfATensorWithoutElementsThereAreNone) {
  EXPECT_TRUE(boxes_of({3, 0}, {0, 0}).empty());
  EXPECT_EQ(fault_of({3, 0}, {}), "");
  EXPECT_EQ(fault_of({3, 0}, {whole({3, 0})}), "");
}

TEST(Box, Intersections) {
  EXPECT_EQ(intersection({{0, 0}, {4, 4}}, {{2, 3}, {4, 4}}), (Box{{2, 3}, {2, 1}}));
  EXPECT_EQ(intersection({{0, 0}, {2, 4}}, {{2, 0}, {2, 4}}), std::nullopt);
  EXPECT_EQ(intersection({{}, {}}, {{}, {}}), (Box{{}, {}}));
}

TEST(Box, FaultsOfACover) {
  const Sizes sizes{4, 4};
  const Box top{{0, 0}, {2, 4}}, left{{2, 0}, {2, 2}}, right{{2, 2}, {2, 2}};
  EXPECT_EQ(fault_of(sizes, {right, top, left}), "");
  EXPECT_EQ(fault_of(sizes, {top, left}), "12 of 16 elements");
  EXPECT_EQ(fault_of(sizes, {top, top}), "[0:2, 0:4] overlaps [0:2, 0:4]");
  EXPECT_EQ(fault_of(sizes, {top, top, left}), "its parts hold more elements than it has");
  EXPECT_EQ(fault_of(sizes, {top, {{2, 2}, {2, 4}}}), "[2:4, 2:6] lies outside");
  EXPECT_EQ(fault_of(sizes, {{{0}, {16}}}), "[0:16] lies outside");
  EXPECT_EQ(fault_of(sizes, {top, left, {{1, 2}, {2, 2}}}), "[1:3, 2:4] overlaps [0:2, 0:4]");
  EXPECT_EQ(fault_of({}, {whole({})}), "");
  EXPECT_EQ(fault_of({}, {whole({}), whole({})}), "its parts hold more elements than it has");
}

}  // namespace
}  // namespace lockstep::test

// The one reduction order: the same bits whatever the path, the cut or the rank that adds.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>

#include "support/spawn.h"

namespace lockstep::comm {
namespace {

using test::name_of;
using test::Ranks;
using test::spawn;

// Numbers of very different size, so that another order gives other bits.
at::Tensor rough(int64_t count, int rank, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(1000 + rank);
  return at::randn({count}, generator, at::kDouble)
      .mul_(at::randn({count}, generator, at::kDouble).exp_())
      .to(dtype);
}

// The definition: n ranks split at the largest power of two below n; each node rounds.
at::Tensor tree(const std::vector<at::Tensor>& parts, int begin, int end) {
  if (end - begin == 1) return parts[begin];
  int left = 1;
  while (2 * left < end - begin) left *= 2;
  return tree(parts, begin, begin + left) + tree(parts, begin + left, end);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

class TreeOrder : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(
    Of, TreeOrder,
    testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3}, Ranks{"shm", 4}, Ranks{"shm", 5},
                    Ranks{"shm", 7}, Ranks{"shm", 8}, Ranks{"tcp", 2}, Ranks{"tcp", 3},
                    Ranks{"tcp", 4}, Ranks{"tcp", 7}, Ranks{"gloo", 2}, Ranks{"gloo", 3},
                    Ranks{"gloo", 4}, Ranks{"gloo", 7}, Ranks{"auto", 4, {0, 0, 1, 1}},
                    Ranks{"auto", 4, {0, 1, 1, 0}}, Ranks{"auto", 6, {0, 0, 1, 1, 2, 2}},
                    Ranks{"auto", 6, {0, 0, 0, 1, 1, 1}}, Ranks{"auto", 6, {0, 1, 1, 2, 2, 2}}),
    name_of);

// Every transport gives the bits of the definition, and so those of every other.
TEST_P(TreeOrder, HoldsOnEveryPath) {
  const auto body = [](World& world) {
    const Group& group = world.group();
    const int n = world.size();
    EXPECT_TRUE(group.deterministic());
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (int64_t count : {3, 1000, 200003}) {
        std::vector<at::Tensor> parts;
        for (int r = 0; r < n; ++r) parts.push_back(rough(count, r, dtype));
        const at::Tensor sum = tree(parts, 0, n), mean = sum / n;

        at::Tensor staged = parts[world.rank()].clone();
        group.all_reduce(staged).wait();
        EXPECT_TRUE(same_bits(staged, sum)) << "staged " << dtype << " x " << count;

        at::Tensor in_place = group.empty({count}, dtype);
        in_place.copy_(parts[world.rank()]);
        group.all_reduce(in_place, ReduceOp::Average).wait();
        EXPECT_TRUE(same_bits(in_place, mean)) << "in place " << dtype << " x " << count;

        at::Tensor pieces = group.empty({count}, dtype);
        pieces.copy_(parts[world.rank()]);
        for (int64_t at = 0; at < count; at += 7777) {
          group.all_reduce(pieces.narrow(0, at, std::min<int64_t>(7777, count - at))).wait();
        }
        EXPECT_TRUE(same_bits(pieces, sum)) << "in pieces " << dtype << " x " << count;

        std::vector<at::Tensor> cut;
        for (int r = 0; r < n; ++r)
          cut.push_back(
              parts[world.rank()].narrow(0, r * count / n, (r + 1) * count / n - r * count / n));
        at::Tensor mine = at::empty_like(cut[world.rank()]);
        group.reduce_scatter(mine, cut).wait();
        EXPECT_TRUE(
            same_bits(mine, sum.narrow(0, world.rank() * count / n, mine.numel()).contiguous()))
            << "scattered " << dtype << " x " << count;

        at::Tensor at_root = parts[world.rank()].clone();
        group.reduce(at_root, n - 1).wait();
        EXPECT_TRUE(same_bits(at_root, world.rank() == n - 1 ? sum : parts[world.rank()]))
            << "reduced " << dtype << " x " << count;
      }
    }
  };
  spawn(GetParam(), body);
}

}  // namespace
}  // namespace lockstep::comm

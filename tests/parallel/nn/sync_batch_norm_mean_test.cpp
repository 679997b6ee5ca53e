// SyncBatchNorm of inputs whose mean is far from zero: as one BatchNorm over all ranks' rows.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "lockstep/lockstep.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

at::Tensor far_rows(int rank, double mean) {
  // The ranks' means differ, and so do their numbers of rows; rank 2 has none.
  const int64_t count = rank == 2 ? 0 : 16 + 8 * rank;
  return at::randn({count, 5}, at::detail::createCPUGenerator(static_cast<uint64_t>(rank)),
                   at::kDouble) +
         mean + rank;
}

TEST(SyncBatchNorm, Float64KeepsItsVarianceFarFromZero) {
  spawn(4, [](World& world) {
    for (const double mean : {0.0, 1e4, -1e8}) {
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < world.size(); ++rank) all.push_back(far_rows(rank, mean));
      SyncBatchNorm1d layer(torch::nn::BatchNormOptions(5), world.group());
      torch::nn::BatchNorm1d usual(5);
      layer->to(at::kDouble);
      usual->to(at::kDouble);
      at::Tensor mine = all[world.rank()].clone().requires_grad_(true);
      at::Tensor together = at::cat(all).requires_grad_(true);
      const at::Tensor y = layer(mine), z = usual(together);
      y.pow(3).sum().backward();
      z.pow(3).sum().backward();
      int64_t begin = 0;
      for (int rank = 0; rank < world.rank(); ++rank) begin += all[rank].size(0);
      // 1e8 has 8 of float64's 16 digits; the variance itself loses none.
      const double tolerance = mean == 0 ? 1e-12 : 1e-6;
      const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, mine.size(0)); };
      EXPECT_TRUE(at::allclose(y, part(z), tolerance, tolerance)) << mean;
      EXPECT_TRUE(at::allclose(mine.grad(), part(together.grad()), tolerance, tolerance)) << mean;
      EXPECT_TRUE(at::allclose(layer->running_var, usual->running_var, 1e-7)) << mean;
      EXPECT_TRUE(at::allclose(layer->running_mean, usual->running_mean, 1e-14)) << mean;
    }
  });
}

}  // namespace
}  // namespace lockstep::test

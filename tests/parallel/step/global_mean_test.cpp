// Unequal micro-batches on unequal ranks give the mean over all samples.
#include "lockstep/parallel/global_mean.h"

#include <limits>

#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

// Rows of rank's micro-batch; rank 1's second is empty, and rank 2 has none at all.
int64_t rows_of(int rank, int micro_batch) {
  return rank % 3 == 2 ? 0 : rank % 3 == 1 && micro_batch == 1 ? 0 : 1 + rank + 2 * micro_batch;
}

constexpr int kParts = 3;

at::Tensor micro_batch(int rank, int index) { return input(rank, index, rows_of(rank, index)); }

at::Tensor summed_loss(Mlp& net, const at::Tensor& x) { return net.forward(x).square().sum(); }

// One process, all samples at once.
std::vector<at::Tensor> whole_gradients(int ranks, double& loss) {
  std::vector<at::Tensor> batches;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int i = 0; i < kParts; ++i) batches.push_back(micro_batch(rank, i));
  }
  Mlp net;
  const auto batch = at::cat(batches);
  const auto mean = summed_loss(net, batch) / batch.size(0);
  mean.backward();
  loss = mean.item<double>();
  return gradients(net);
}

// The sums are grouped otherwise: float32 rounding.
void expect_whole(World& world, Mlp& net, double mean_loss) {
  double loss = 0;
  const auto want = whole_gradients(world.size(), loss);
  EXPECT_NEAR(mean_loss, loss, 1e-6);
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_TRUE(at::allclose(gradients(net)[i], want[i], 1e-5, 1e-7));
  }
}

class GlobalMeanWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlobalMeanWorlds, ::testing::ValuesIn(kWorlds),
                         ::testing::PrintToStringParamName());

TEST_P(GlobalMeanWorlds, B32_AccumulationCountedOnTheWayIsTheMeanOverAllSamples) {
  spawn(GetParam(), [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    GlobalMean mean(world.group());
    for (int round = 0; round < 2; ++round) {
      ddp.zero_grad();
      at::Tensor sum = at::zeros({});
      int64_t count = 0;
      for (int i = 0; i < kParts; ++i) {
        std::optional<parallel::Hold> hold;
        if (i + 1 < kParts) hold.emplace(ddp.hold());
        const auto x = micro_batch(world.rank(), i);
        const auto loss = summed_loss(net, x);
        loss.backward();
        mean.add(x.size(0));
        sum += loss.detach();
        count += x.size(0);
      }
      int64_t total = 0;
      for (int rank = 0; rank < world.size(); ++rank) {
        for (int i = 0; i < kParts; ++i) total += rows_of(rank, i);
      }
      EXPECT_EQ(mean.scale_gradients_(net.parameters()), total);
      expect_whole(world, net, global_mean(world.group(), sum, count));
    }
  });
}

TEST_P(GlobalMeanWorlds, B32_ALossScaledBeforehandGivesTheSame) {
  spawn(GetParam(), [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    int64_t count = 0;
    for (int i = 0; i < kParts; ++i) count += rows_of(world.rank(), i);
    const double scale = global_mean_scale(world.group(), count);
    at::Tensor sum = at::zeros({});
    for (int i = 0; i < kParts; ++i) {
      std::optional<parallel::Hold> hold;
      if (i + 1 < kParts) hold.emplace(ddp.hold());
      const auto loss = summed_loss(net, micro_batch(world.rank(), i));
      (loss * scale).backward();
      sum += loss.detach();
    }
    expect_whole(world, net, global_mean(world.group(), sum, count));
  });
}

TEST(GlobalMean, NoSampleAnywhereIsRefusedByAllAndANegativeCountAtOnce) {
  spawn(2, [](World& world) {
    EXPECT_THROW(global_count(world.group(), 0), ConfigError);
    EXPECT_THROW(global_mean(world.group(), at::zeros({}), 0), ConfigError);
    EXPECT_THROW(GlobalMean(world.group()).add(-1), ConfigError);
    EXPECT_THROW(global_count(world.group(), -1), ConfigError);
    EXPECT_EQ(global_count(world.group(), 2 + world.rank()), 5);
    EXPECT_THROW(global_count(world.group(), std::numeric_limits<int64_t>::max()), ConfigError);
    EXPECT_THROW(global_mean(world.group(), at::zeros({2}), 1), ConfigError);
  });
}

// What a loss is divided by may be a sum of weights.
TEST(GlobalMean, CountsMayBeWeights) {
  spawn(2, [](World& world) {
    const auto weights = torch::tensor({0.25, 1.0, 3.5}, at::kDouble);
    const auto targets = [](int rank) { return torch::arange(2 + rank) % 3; };
    const auto rows = [](int rank) {
      return at::randn({2 + rank, 4}, at::detail::createCPUGenerator(5 + rank), at::kDouble);
    };
    const auto loss = [&](torch::nn::Linear& net, const at::Tensor& x, const at::Tensor& y,
                          const auto& reduction) {
      return torch::nn::functional::cross_entropy(
          net(x), y,
          torch::nn::functional::CrossEntropyFuncOptions().weight(weights).reduction(reduction));
    };
    const auto make = [] {
      torch::manual_seed(2);
      torch::nn::Linear net(4, 3);
      net->to(at::kDouble);
      return net;
    };
    torch::nn::Linear net = make(), whole = make();
    Ddp ddp(net, world);
    const at::Tensor y = targets(world.rank());
    const auto own = loss(net, rows(world.rank()), y, torch::kSum);
    own.backward();
    GlobalMean mean(world.group());
    const double count = weights.index_select(0, y).sum().item<double>();
    mean.add(count);
    EXPECT_EQ(mean.scale_gradients_(net->parameters()), 2 * (0.25 + 1.0) + 3.5);
    const auto want =
        loss(whole, at::cat({rows(0), rows(1)}), at::cat({targets(0), targets(1)}), torch::kMean);
    want.backward();
    EXPECT_TRUE(at::allclose(net->weight.grad(), whole->weight.grad(), 1e-12, 1e-12));
    EXPECT_NEAR(global_mean(world.group(), own.detach(), count), want.item<double>(), 1e-12);
    EXPECT_NEAR(global_mean_scale(world.group(), count), 2 / 6.0, 1e-12);
    EXPECT_THROW(mean.add(std::numeric_limits<double>::infinity()), ConfigError);

    torch::nn::Linear other = make();
    const Ddp lanes(other, world, {.lanes = 2});
    EXPECT_THROW(global_mean_scale(world.group(), 0.5), ConfigError);
    EXPECT_EQ(global_mean_scale(world.group(), 2), 0.5);
  });
}

}  // namespace
}  // namespace lockstep::test

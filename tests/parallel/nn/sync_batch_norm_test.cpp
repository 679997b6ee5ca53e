// SyncBatchNorm on N ranks is BatchNorm in one process on the concatenated batch.
#include "lockstep/parallel/sync_batch_norm.h"

#include <sstream>

#include "parallel/python.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using parallel::SyncBatchNormImpl;
using parallel::TorchBatchNormImpl;
using torch::nn::BatchNormOptions;

constexpr int64_t kChannels = 3;

// What a comparison varies: each rank's rows are rows[rank % size], the rest of the shape follows
// the channels.
struct Batches {
  std::vector<int64_t> rows{4};
  std::vector<int64_t> rest = {};
  at::ScalarType dtype = at::kFloat;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  double mean = 0.5;

  at::Tensor of(int rank, int step) const {
    std::vector<int64_t> shape{rows[rank % rows.size()], kChannels};
    shape.insert(shape.end(), rest.begin(), rest.end());
    auto generator = at::detail::createCPUGenerator(1000 * step + rank);
    return (at::randn(shape, generator) * 2 + mean).to(dtype).contiguous(format);
  }
  at::Tensor whole(int ranks, int step) const {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < ranks; ++rank) parts.push_back(of(rank, step));
    return at::cat(parts).contiguous(format);
  }
  int64_t before(int rank) const {
    int64_t sum = 0;
    for (int r = 0; r < rank; ++r) sum += rows[r % rows.size()];
    return sum;
  }
};

// A loss whose gradient differs from element to element, the same for a slice as in the whole.
template <typename Layer>
std::pair<at::Tensor, at::Tensor> output_and_slope(Layer& layer, const at::Tensor& batch) {
  auto x = batch.detach().clone().requires_grad_(true);
  const auto y = layer.forward(x);
  (y * torch::sin(3 * batch)).sum().backward();
  return {y.detach(), x.grad()};
}

// Float32 rounds each value by 6e-8; sums of some hundred terms and a division lose two digits of
// it. Half keeps 11 bits, bfloat16 8.
double tolerance(at::ScalarType dtype) {
  return dtype == at::kHalf       ? 2e-3
         : dtype == at::kBFloat16 ? 2e-2
         : dtype == at::kDouble   ? 1e-10
                                  : 2e-5;
}

void expect_near(const at::Tensor& got, const at::Tensor& want, double within, const char* what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_EQ(got.scalar_type(), want.scalar_type()) << what;
  EXPECT_TRUE(at::allclose(got, want, within, within))
      << what << ": largest difference " << (got - want).abs().max().template item<double>();
}

// Three training steps and an evaluation, over `group`, whose ranks have the batches first, first
// + 1...
template <size_t D>
void expect_one_process(const Group& group, const Batches& batches, const BatchNormOptions& options,
                        int first = 0) {
  TorchBatchNormImpl<D> whole(options);
  SyncBatchNormImpl<D> mine(options, group);
  if (batches.dtype == at::kDouble) whole.to(at::kDouble), mine.to(at::kDouble);
  const double within = tolerance(batches.dtype);
  Batches these = batches;
  std::rotate(these.rows.begin(), these.rows.begin() + first % these.rows.size(), these.rows.end());
  const int64_t begin = these.before(group.rank()), end = these.before(group.rank() + 1);
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE(::testing::Message() << "step " << step);
    const auto everything = these.whole(group.size(), step);
    const auto [want, want_slope] = output_and_slope(whole, everything);
    const auto [got, got_slope] = output_and_slope(mine, these.of(group.rank(), step));
    expect_near(got, want.slice(0, begin, end), within, "output");
    expect_near(got_slope, want_slope.slice(0, begin, end), within * 4, "gradient of the input");
    if (got.numel() > 0) {
      EXPECT_EQ(got.suggest_memory_format(), batches.format);
    }
  }
  for (size_t i = 0; i < whole.parameters().size(); ++i) {
    auto sum = mine.parameters()[i].grad().clone();
    group.all_reduce(sum).wait();
    expect_near(sum, whole.parameters()[i].grad(), within * 10, "gradient of a parameter");
  }
  const bool wide = batches.dtype == at::kFloat || batches.dtype == at::kDouble;
  for (size_t i = 0; i < whole.buffers().size(); ++i) {
    expect_near(mine.buffers()[i], whole.buffers()[i], wide ? within : 1e-3, "buffer");
  }
  if (!options.track_running_stats()) return;
  whole.eval(), mine.eval();
  const auto x = batches.of(0, 9);
  expect_near(mine.forward(x), whole.forward(x), within * 4, "output in eval()");
}

class SyncBatchNormWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SyncBatchNormWorlds, ::testing::ValuesIn(kWorlds),
                         ::testing::PrintToStringParamName());

TEST_P(SyncBatchNormWorlds, B64_OneDimension) {
  spawn(GetParam(), [](World& world) {
    expect_one_process<1>(world.group(), {}, BatchNormOptions(kChannels));
    expect_one_process<1>(world.group(), {.rest = {5}}, BatchNormOptions(kChannels));
  });
}

TEST_P(SyncBatchNormWorlds, B64_TwoAndThreeDimensions) {
  spawn(GetParam(), [](World& world) {
    expect_one_process<2>(world.group(), {.rest = {4, 3}}, BatchNormOptions(kChannels));
    expect_one_process<3>(world.group(), {.rest = {2, 4, 3}}, BatchNormOptions(kChannels));
  });
}

TEST_P(SyncBatchNormWorlds, B64_AffineOffAndNoRunningStatistics) {
  spawn(GetParam(), [](World& world) {
    expect_one_process<2>(world.group(), {.rest = {4, 3}},
                          BatchNormOptions(kChannels).affine(false).eps(0.1));
    expect_one_process<2>(world.group(), {.rest = {4, 3}},
                          BatchNormOptions(kChannels).track_running_stats(false));
  });
}

TEST_P(SyncBatchNormWorlds, B64_MomentumNoneAveragesAllSteps) {
  spawn(GetParam(), [](World& world) {
    expect_one_process<1>(world.group(), {}, BatchNormOptions(kChannels).momentum(std::nullopt));
  });
}

TEST_P(SyncBatchNormWorlds, B64_SizesDifferAndOneRankHasNone) {
  spawn(GetParam(), [](World& world) {
    expect_one_process<1>(world.group(), {.rows = {5, 0, 1, 3}}, BatchNormOptions(kChannels));
    expect_one_process<2>(world.group(), {.rows = {2, 3, 0}, .rest = {3, 2}},
                          BatchNormOptions(kChannels));
  });
}

TEST_P(SyncBatchNormWorlds, B64_HalfAndDoubleInputs) {
  spawn(GetParam(), [](World& world) {
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
      expect_one_process<2>(world.group(), {.rest = {4, 3}, .dtype = dtype},
                            BatchNormOptions(kChannels));
    }
  });
}

TEST_P(SyncBatchNormWorlds, B64_ChannelsLast) {
  spawn(GetParam(), [](World& world) {
    expect_one_process<2>(world.group(), {.rest = {4, 5}, .format = at::MemoryFormat::ChannelsLast},
                          BatchNormOptions(kChannels));
    expect_one_process<3>(world.group(),
                          {.rest = {2, 4, 5}, .format = at::MemoryFormat::ChannelsLast3d},
                          BatchNormOptions(kChannels));
  });
}

TEST(SyncBatchNorm, B64_AMeanFarFromZeroKeepsTheVariance) {
  spawn(3, [](World& world) {
    SyncBatchNorm1d layer(BatchNormOptions(kChannels).momentum(1.0), world.group());
    const Batches batches{.rows = {40}, .mean = 3000};
    layer(batches.of(world.rank(), 0));
    const auto whole = batches.whole(3, 0).to(at::kDouble);
    expect_near(layer->running_var.to(at::kDouble), whole.var(0), 1e-3, "variance");
  });
}

TEST(SyncBatchNorm, B64_GroupsOfTwoOfFourRanks) {
  spawn(4, [](World& world) {
    const int half = world.rank() / 2;
    const Group pair = world.group().split(half);
    expect_one_process<1>(pair, {.rows = {4, 2, 3, 6}}, BatchNormOptions(kChannels), 2 * half);
  });
}

TEST(SyncBatchNorm, B64_RanksHaveTheSameStatisticsToTheBit) {
  spawn(3, [](World& world) {
    SyncBatchNorm1d layer(BatchNormOptions(kChannels), world.group());
    for (int step = 0; step < 3; ++step) layer(Batches{.rows = {4, 5, 6}}.of(world.rank(), step));
    for (const auto& buffer : layer->buffers()) {
      auto first = buffer.clone();
      world.group().broadcast(first).wait();
      EXPECT_TRUE(at::equal(first, buffer));
    }
  });
}

// The same kernel on the same tensors.
TEST(SyncBatchNorm, B64_EvalAndAGroupOfOneAreBatchNormBitForBit) {
  spawn(2, [](World& world) {
    torch::nn::BatchNorm2d torch_layer{BatchNormOptions(kChannels)};
    SyncBatchNorm2d alone{BatchNormOptions(kChannels)},
        pair(BatchNormOptions(kChannels), world.group());
    const Batches batches{.rest = {4, 4}};
    for (int step = 0; step < 3; ++step) {
      const auto want = output_and_slope(*torch_layer, batches.of(world.rank(), step));
      const auto got = output_and_slope(*alone, batches.of(world.rank(), step));
      EXPECT_TRUE(at::equal(got.first, want.first) && at::equal(got.second, want.second));
    }
    EXPECT_TRUE(at::equal(alone->running_var, torch_layer->running_var));
    pair->running_mean.copy_(torch_layer->running_mean);
    pair->running_var.copy_(torch_layer->running_var);
    pair->eval(), torch_layer->eval();
    // One rank alone: nobody answers a collective.
    if (world.rank() == 1) return;
    EXPECT_TRUE(at::equal(pair(batches.of(0, 5)), torch_layer(batches.of(0, 5))));
  });
}

TEST(SyncBatchNorm, B64_OneSampleARankIsEnoughAndOneInAllIsRefusedByAll) {
  spawn(3, [](World& world) {
    expect_one_process<1>(world.group(), {.rows = {1}}, BatchNormOptions(kChannels));
    SyncBatchNorm1d layer(BatchNormOptions(kChannels), world.group());
    EXPECT_THROW(layer(at::ones({world.rank() == 1 ? 1 : 0, kChannels})), ConfigError);
  });
}

TEST(SyncBatchNorm, B64_NoSampleOnAnyRankLeavesTheStatistics) {
  spawn(2, [](World& world) {
    SyncBatchNorm1d layer(BatchNormOptions(kChannels), world.group());
    EXPECT_EQ(layer(at::ones({0, kChannels})).sizes(), at::IntArrayRef({0, kChannels}));
    EXPECT_TRUE(at::equal(layer->running_var, at::ones({kChannels})));
  });
}

TEST(SyncBatchNorm, B64_AnInputOfOtherDimensionsIsRefused) {
  spawn(1, [](World&) {
    SyncBatchNorm2d layer{BatchNormOptions(kChannels)};
    try {
      layer(at::ones({4, kChannels}));
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("sizes [4, 3] for SyncBatchNorm2d"));
    }
    EXPECT_THROW(layer(at::ones({4, kChannels + 1, 2, 2})), ConfigError);
  });
}

TEST(SyncBatchNorm, B64_ASecondDerivativeIsRefused) {
  spawn(2, [](World& world) {
    SyncBatchNorm1d layer(BatchNormOptions(kChannels), world.group());
    const auto y = layer(at::randn({4, kChannels}).requires_grad_(true));
    EXPECT_THROW(y.sum().backward({}, true, /*create_graph=*/true), ConfigError);
  });
}

TEST(SyncBatchNorm, ACloneAndPrintedTextAreItsOwn) {
  spawn(2, [](World& world) {
    SyncBatchNorm1d layer(BatchNormOptions(kChannels).momentum(std::nullopt), world.group());
    layer->to(at::kDouble);
    const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl<1>>(layer->clone());
    EXPECT_EQ(copy->weight.scalar_type(), at::kDouble);
    EXPECT_FALSE(copy->weight.is_same(layer->weight));
    EXPECT_EQ(copy->group().size(), 2);
    std::ostringstream text;
    text << layer;
    EXPECT_THAT(text.str(), ::testing::HasSubstr("SyncBatchNorm1d(3, eps=1e-05, momentum=None"));
  });
}

torch::nn::Sequential normalised_net() {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  net->push_back(torch::nn::Linear(6, 8));
  net->push_back(torch::nn::BatchNorm1d(8));
  net->push_back(torch::nn::Tanh());
  net->push_back(torch::nn::Linear(8, 3));
  return net;
}

// Float32 rounding in other groupings, over 20 steps.
TEST(SyncBatchNorm, B64_ThreeRanksUnderDdpTrainAsPythonDoesOnTheWholeBatch) {
  const auto python = python_numbers("sync_batch_norm");
  spawn(3, [&](World& world) {
    auto net = normalised_net();
    ASSERT_EQ(convert_sync_batch_norm(*net, world.group()), 1U);
    Ddp ddp(*net, world.group());
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 20; ++step) {
      ddp.zero_grad();
      const auto loss = net->forward(input(world.rank(), step)).square().mean();
      loss.backward();
      sgd.step();
      auto mean = loss.detach().clone();
      world.group().all_reduce(mean, ReduceOp::Average).wait();
      EXPECT_NEAR(mean.item<double>(), python.at(step), 1e-5) << "step " << step;
    }
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_NEAR(net->buffers()[0][i].item<double>(), python.at(20 + i), 1e-5);
      EXPECT_NEAR(net->buffers()[1][i].item<double>(), python.at(28 + i), 1e-5);
    }
  });
}

}  // namespace
}  // namespace lockstep::test

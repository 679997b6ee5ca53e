// A Trainer leaves the bits of the loop that a program would write.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <optional>

#include "support/spawn.h"
#include "train/net.h"

namespace lockstep {
namespace {

namespace F = torch::nn::functional;
using test::Features;
using test::flat;
using test::spawn;
using test::TrainNet;

constexpr int64_t kSamples = 113;

// Micro-batches as [begin, end) of an epoch's batches, with gradients of the mean over a step.
void one_step(const std::vector<Batch>& batches, TrainNet& net, Ddp& ddp, GradScaler& scaler,
              const Features& features) {
  int64_t samples = 0;
  for (const auto& batch : batches) samples += batch.data.size(0);
  for (size_t i = 0; i < batches.size(); ++i) {
    std::optional<parallel::Hold> hold;
    if (i + 1 < batches.size()) hold.emplace(ddp.hold());
    std::optional<Autocast> autocast;
    if (features.has("fp16")) autocast.emplace(at::kCPU, at::kHalf);
    if (features.has("bf16")) autocast.emplace(at::kCPU, at::kBFloat16);
    auto loss = F::cross_entropy(net->forward(batches[i].data), batches[i].target);
    autocast.reset();
    const auto part = static_cast<double>(samples) / static_cast<double>(batches[i].data.size(0));
    if (part != 1) loss = loss / part;
    scaler.scale(loss).backward();
  }
}

at::Tensor by_hand(World& world, const Features& features) {
  seed_everything(1, world);
  TrainNet net;
  if (features.has("sync_bn")) convert_sync_batch_norm(net, world);
  if (features.has("sync_pairs")) {
    convert_sync_batch_norm(net, world.group().split(world.rank() / 2));
  }
  const auto options = test::train_options(features);
  auto ddp_options = options.ddp;
  ddp_options.lanes = options.loader.lanes;
  Ddp ddp(net, world, ddp_options);
  const double scale =
      features.has("scaling") ? std::sqrt(features.has("lanes") ? 4.0 : world.size()) : 1.0;
  const auto make = [&](std::vector<torch::optim::OptimizerParamGroup> groups)
      -> std::unique_ptr<torch::optim::Optimizer> {
    if (features.has("sgd")) {
      return std::make_unique<FusedSGD>(std::move(groups),
                                        torch::optim::SGDOptions(0.05 * scale).momentum(0.9));
    }
    return std::make_unique<FusedAdamW>(std::move(groups),
                                        torch::optim::AdamWOptions(1e-2 * scale).weight_decay(0.1));
  };
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (features.has("zero")) {
    optimizer = std::make_unique<ZeroOptimizer>(net->parameters(), world, make);
  } else {
    optimizer = make({torch::optim::OptimizerParamGroup(net->parameters())});
  }
  GradScaler scaler(world,
                    {.init_scale = 1048576, .growth_interval = 4, .enabled = features.has("fp16")});
  const auto samples = test::train_samples(kSamples);
  Loader loader(samples, world, options.loader);
  const int64_t micro = options.accumulation;
  const int64_t steps = options.epochs * ((loader.batches() + micro - 1) / micro);
  std::optional<LrScheduler> schedule;
  if (features.has("cosine")) {
    // Five steps up, then half a cosine wave.
    const auto wave = parallel::cosine_lr({.steps = steps - 5, .lowest_lr = 1e-4});
    schedule.emplace(*optimizer, parallel::Schedule{.lr = [wave](double base, int64_t step) {
      return step < 5 ? base * static_cast<double>(step) / 5.0 : wave.lr(base, step - 5);
    }});
  }
  const auto update = [&] {
    if (features.has("clip")) {
      scaler.unscale_(*optimizer);
      clip_grad_norm_(net->parameters(), 0.5);
    }
    scaler.step(*optimizer);
    scaler.update();
    if (schedule) schedule->step();
  };
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    auto left = loader.batches();
    if (features.has("lanes")) {
      std::vector<std::vector<Batch>> of_lanes;
      int64_t taken = 0;
      for (auto step : loader.steps(epoch)) {
        const auto [first, last] = step.lanes();
        of_lanes.resize(last - first);
        for (int64_t lane = first; lane < last; ++lane) {
          const Batch& batch = step.batch(lane);
          of_lanes[lane - first].push_back({batch.data.clone(), batch.target.clone()});
        }
        if (--left > 0 && ++taken % micro != 0) continue;
        ddp.zero_grad();
        for (const Lane lane : ddp.lanes(step.next_key())) {
          one_step(of_lanes[lane.index - first], net, ddp, scaler, features);
        }
        update();
        of_lanes.clear();
      }
      continue;
    }
    std::vector<Batch> batches;
    for (const auto& batch : loader.epoch(epoch)) {
      batches.push_back({batch.data.clone(), batch.target.clone()});
      if (--left > 0 && std::ssize(batches) < micro) continue;
      ddp.zero_grad();
      one_step(batches, net, ddp, scaler, features);
      update();
      batches.clear();
    }
  }
  return flat(*net);
}

at::Tensor by_trainer(World& world, const Features& features) {
  seed_everything(1, world);
  TrainNet net;
  const auto samples = test::train_samples(kSamples);
  train::Trainer trainer(world, net, train::cross_entropy(), samples,
                         test::train_options(features));
  const auto outcome = trainer.run();
  EXPECT_EQ(outcome.ended, train::Ended::Finished);
  EXPECT_EQ(outcome.state.step, outcome.state.steps);
  EXPECT_EQ(outcome.exit_status(), 0);
  return flat(*net);
}

class ByHand : public testing::TestWithParam<Features> {};

INSTANTIATE_TEST_SUITE_P(
    Features, ByHand,
    testing::Values(Features{}, Features{{"accumulation"}}, Features{{"clip", "cosine", "sgd"}},
                    Features{{"accumulation", "fp16", "clip", "zero", "sync_bn", "hook"}},
                    Features{{"accumulation", "bf16", "zero", "scaling", "drop_last"}},
                    Features{{"lanes"}}, Features{{"lanes", "fp16", "clip", "zero", "scaling"}},
                    Features{{"lanes", "accumulation", "bf16", "sgd"}},
                    Features{{"sync_bn", "hook", "fp16"}}, Features{{"zero", "cosine", "hook"}}),
    [](const auto& test) { return test.param.text(); });

TEST_P(ByHand, HasTheSameBits) {
  for (const int ranks : {1, 2, 4}) {
    spawn(ranks, [&](World& world) {
      const at::Tensor expected = by_hand(world, GetParam());
      const at::Tensor found = by_trainer(world, GetParam());
      EXPECT_TRUE(at::equal(expected, found))
          << ranks << " ranks: " << (expected - found).abs().max();
    });
  }
}

void expect_the_same(const test::Ranks& ranks, const Features& features) {
  spawn(ranks, [&](World& world) {
    const at::Tensor expected = by_hand(world, features);
    const at::Tensor found = by_trainer(world, features);
    EXPECT_TRUE(at::equal(expected, found)) << (expected - found).abs().max();
  });
}

TEST(ByHandToo, OverEveryTransport) {
  for (const char* transport : {"gloo", "tcp"}) {
    expect_the_same({transport, 2}, {{"accumulation", "clip", "zero", "sync_bn"}});
  }
}

TEST(ByHandToo, WithBatchNormOverGroupsOfRanks) {
  for (const auto& features : {Features{{"sync_pairs", "sgd"}},
                               Features{{"sync_pairs", "accumulation", "clip", "zero"}}}) {
    expect_the_same({"shm", 4}, features);
    expect_the_same({"tcp", 4}, features);
  }
}

// A data set of libtorch's, as it is.
struct TorchSamples : torch::data::datasets::Dataset<TorchSamples> {
  torch::data::Example<> get(size_t index) override {
    const std::vector<int64_t> one = {static_cast<int64_t>(index)};
    const auto batch = samples.get_batch(one);
    return {batch.data[0], batch.target[0]};
  }
  std::optional<size_t> size() const override { return kSamples; }
  data::TensorDataset samples = test::train_samples(kSamples);
};

TEST(ByHandToo, OfADataSetOfTorchs) {
  using namespace torch::data;
  spawn(2, [](World& world) {
    for (const auto& features : {Features{{"accumulation"}}, Features{{"lanes", "clip"}}}) {
      const at::Tensor expected = by_trainer(world, features);
      const auto trained = [&](const train::DataSource& source) {
        seed_everything(1, world);
        TrainNet net;
        train::Trainer(world, net, train::cross_entropy(), source, test::train_options(features))
            .run();
        return flat(*net);
      };
      EXPECT_TRUE(at::equal(trained(TorchSamples()), expected));
      // As it is written for a loader of torch's.
      EXPECT_TRUE(at::equal(trained(TorchSamples().map(transforms::Stack<>())), expected));
      EXPECT_TRUE(at::equal(
          trained(datasets::make_shared_dataset<TorchSamples>().map(transforms::Stack<>())),
          expected));
    }
  });
  auto loader = decltype(make_data_loader(TorchSamples(), DataLoaderOptions())){};
  static_assert(!std::constructible_from<train::DataSource, decltype(loader)>);
}

}  // namespace
}  // namespace lockstep

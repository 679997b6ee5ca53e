// A Trainer of random models: sparse tables, mixed dtypes, complex numbers, frozen layers, blocks
// that a batch leaves out, scripted modules, collectives in the graph. It has the bits of a loop
// over a Ddp, over any transport, also with an Fsdp, and when it is stopped and resumed.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/update_batch_norm.h"
#include "random/training/net.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::flat;
using test::Folder;
using test::Ranks;
using test::spawn;
using test::training::Moment;
using test::training::Net;
using test::training::Program;
using test::training::Random;
using train::Trainer;
using train::TrainerOptions;

constexpr int64_t kRows = 4;  // of a batch

struct RandomRun {
  Program net;
  TrainerOptions options;
  double skip = 0;       // how likely a batch leaves a block out
  bool freezes = false;  // the last parameter
  bool renews = false;   // running statistics, by a callback
  bool loads = false;    // other values, by a callback
  std::optional<FsdpOptions> fsdp;
  int64_t stop_at = 0;  // then resumed
};

RandomRun composed(uint64_t seed) {
  Random random(seed * 7907 + 3);
  RandomRun run;
  TrainerOptions& options = run.options;
  options = {.epochs = 2, .loader = {.batch_size = kRows, .seed = static_cast<int64_t>(seed)}};
  options.loader.lanes = random.pick({0, 0, 0, 4});
  auto names = test::training::block_names();
  if (options.loader.lanes > 0) {  // these see all ranks' samples
    std::erase(names, "sync_batch_norm");
    std::erase(names, "gathered");
  }
  run.net.seed = seed;
  for (auto count = random.between(1, 4); count > 0; --count) {
    run.net.layers.push_back(
        {names[static_cast<size_t>(random.below(std::ssize(names)))], random.next() % 1000});
  }
  const bool is_sparse = run.net.has_layer("embedding_sparse");
  const bool is_complex = run.net.has_layer("complex");
  options.accumulation = random.pick({1, 1, 2, 3});
  options.optimizer = random.chance(0.5) || is_sparse || is_complex
                          ? train::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.02))
                          : train::adamw({.lr = 1e-3});
  options.zero = !is_sparse && random.chance(0.3);
  if (!is_sparse && !is_complex && random.chance(0.3)) options.max_grad_norm = 0.5;
  options.ddp.bucket_bytes = {64 << random.below(4), 4096};
  options.ddp.buffers = random.pick({Buffers::Broadcast, Buffers::Average});
  options.ddp.check_same_every = random.pick({0, 1, 3});
  // A rank whose input needs no gradient does not take part in what others exchange in backward.
  const bool meets = run.net.has_layer("sync_batch_norm") || run.net.has_layer("gathered");
  run.skip = meets ? 0 : random.pick({0.0, 0.3});
  run.freezes = random.chance(0.3);
  // Taking batches through the model leaves each rank buffers of its own in other layers.
  const bool counts = run.net.has_layer("counter") || run.net.has_layer("script");
  run.renews = options.loader.lanes == 0 && !counts && random.chance(0.3);
  run.loads = random.chance(0.3);
  if (!is_sparse && !run.net.has_layer("script") && options.max_grad_norm == 0 &&
      random.chance(0.4)) {
    run.fsdp = FsdpOptions{.min_num_params = random.pick({1, 20}),
                           .share_memory = random.chance(0.5),
                           .buffers = options.ddp.buffers};
    options.zero = false;
    // Which units a batch calls is the same on all ranks.
    run.skip = run.loads = false;
  }
  run.stop_at = random.pick({0, 1, 4});
  return run;
}

data::TensorDataset samples(uint64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return {at::randn({30, test::training::kFeatures}, generator, at::kDouble),
          at::randn({30}, generator, at::kDouble)};
}

struct Learner {
  Learner(const RandomRun& run, World& world)
      : net(std::make_shared<Net>(run.net, 0, world.group())) {
    if (run.freezes) {  // not the head, which is the first
      net->parameters().back().set_requires_grad(net->parameters().size() == 1);
    }
    // By what is in the batch, which a run that is resumed has, too.
    net->skips = [skip = run.skip, this](size_t block, const Moment&) {
      return Random(salt + 31 * block).chance(skip);
    };
  }
  at::Tensor loss(const data::Batch& batch) {
    salt = static_cast<uint64_t>(batch.data.abs().sum().item<double>() * 1e6);
    const auto output = Net::forward({net.get()}, {{batch.data, batch.target}}, {Moment{}}).at(0);
    return torch::dropout(output - batch.target, 0.2, /*train=*/true).square().mean();
  }
  // What a callback does after an epoch.
  void after_epoch(const RandomRun& run, World& world) {
    const at::NoGradGuard no_grad;
    if (run.loads) {
      for (auto& parameter : net->parameters()) parameter.mul_(0.75);
    }
    if (run.renews) {
      update_batch_norm(*net, world, [&] {
        const auto set = samples(run.net.seed);
        for (const int64_t begin : {0, 4}) {
          const auto rows = torch::arange(begin + world.rank(), begin + world.rank() + kRows);
          loss({set.data().index_select(0, rows), set.target().index_select(0, rows)});
        }
      });
    }
  }
  std::shared_ptr<Net> net;
  uint64_t salt = 0;
};

at::Tensor by_hand(World& world, const RandomRun& run) {
  seed_everything(1, world);
  Learner trained(run, world);
  const TrainerOptions& options = run.options;
  auto ddp_options = options.ddp;
  ddp_options.lanes = options.loader.lanes;
  Ddp ddp(*trained.net, world, ddp_options);
  const auto optimizer =
      options.optimizer({torch::optim::OptimizerParamGroup(trained.net->parameters())});
  const auto set = samples(run.net.seed);
  Loader loader(set, world, options.loader);
  const auto backward = [&](const std::vector<data::Batch>& batches) {
    int64_t rows = 0;
    for (const auto& batch : batches) rows += batch.data.size(0);
    for (size_t i = 0; i < batches.size(); ++i) {
      std::optional<parallel::Hold> hold;
      if (i + 1 < batches.size()) hold.emplace(ddp.hold());
      auto loss = trained.loss(batches[i]);
      const auto part = static_cast<double>(rows) / static_cast<double>(batches[i].data.size(0));
      (part != 1 ? loss / part : loss).backward();
    }
  };
  const auto update = [&] {
    if (options.max_grad_norm > 0)
      clip_grad_norm_(trained.net->parameters(), options.max_grad_norm);
    optimizer->step();
  };
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    int64_t left = loader.batches(), taken = 0;
    if (options.loader.lanes > 0) {
      std::vector<std::vector<data::Batch>> of_lanes;
      for (auto step : loader.steps(epoch)) {
        const auto [first, last] = step.lanes();
        of_lanes.resize(last - first);
        for (int64_t lane = first; lane < last; ++lane) {
          const auto& batch = step.batch(lane);
          of_lanes[lane - first].push_back({batch.data.clone(), batch.target.clone()});
        }
        if (--left > 0 && ++taken % options.accumulation != 0) continue;
        ddp.zero_grad();
        for (const Lane lane : ddp.lanes(step.next_key())) backward(of_lanes[lane.index - first]);
        update();
        of_lanes.clear();
      }
    } else {
      std::vector<data::Batch> batches;
      for (const auto& batch : loader.epoch(epoch)) {
        batches.push_back({batch.data.clone(), batch.target.clone()});
        if (--left > 0 && ++taken % options.accumulation != 0) continue;
        ddp.zero_grad();
        backward(batches);
        update();
        batches.clear();
      }
    }
    trained.after_epoch(run, world);
  }
  return flat(*trained.net);
}

struct AtEpochEnd : train::Callback {
  explicit AtEpochEnd(std::function<void()> what) : act(std::move(what)) {}
  void on_epoch_end(const train::RunState&, train::Requests&) override { act(); }
  std::function<void()> act;
};

struct StopAt : train::Callback {
  explicit StopAt(int64_t at) : step(at) {}
  void on_step_end(const train::RunState& state, train::Requests& requests) override {
    if (state.step == step) requests.stop();
  }
  int64_t step;
};

at::Tensor by_trainer(World& world, const RandomRun& run, const std::string& folder,
                      int64_t stop_at) {
  seed_everything(1, world);
  Learner trained(run, world);
  auto options = run.options;
  options.fsdp = run.fsdp;
  if (run.fsdp) options.ddp = {};
  options.saving.directory = folder;
  options.callbacks = {std::make_shared<AtEpochEnd>([&] { trained.after_epoch(run, world); }),
                       std::make_shared<StopAt>(stop_at)};
  Trainer trainer(
      world, train::Model(std::static_pointer_cast<torch::nn::Module>(trained.net)),
      [&](const data::Batch& batch) { return trained.loss(batch); }, samples(run.net.seed),
      options);
  trainer.run();
  if (trainer.fsdp() != nullptr) trainer.fsdp()->unshard();
  return flat(*trained.net).clone();
}

Ranks world_of(uint64_t seed) {
  Random random(seed + 17);
  return random.pick<Ranks>({{"shm", 1},
                             {"shm", 2},
                             {"shm", 3},
                             {"tcp", 2},
                             {"gloo", 2},
                             {"auto", 3, {0, 0, 1}},
                             {"host-then-net", 4, {0, 0, 1, 1}}});
}

void check_seeds(uint64_t first, uint64_t count) {
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const RandomRun run = composed(seed);
    const Folder folder;
    const Ranks ranks = world_of(seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + " on " + ranks.name() + ": " + run.net.text());
    spawn(ranks, [&](World& world) {
      const at::Tensor expected = by_hand(world, run);
      EXPECT_TRUE(expected.isfinite().all().item<bool>());
      if (run.stop_at > 0) by_trainer(world, run, folder / "run", run.stop_at);
      const at::Tensor found = by_trainer(world, run, folder / "run", -1);
      EXPECT_TRUE(at::equal(expected, found)) << (expected - found).abs().max();
    });
  }
}

TEST(RandomNets, HaveTheBitsOfALoop) { check_seeds(1, 12); }
TEST(RandomNets, HaveTheBitsOfALoopToo) { check_seeds(13, 12); }
TEST(RandomNets, DISABLED_HaveTheBitsOfALoopManyTimes) { check_seeds(1000, 400); }

}  // namespace
}  // namespace lockstep

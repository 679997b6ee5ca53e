// Where samples come from, and in what dtype they are computed.
#include <torch/torch.h>

#include <deque>
#include <map>
#include <optional>

#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/autocast.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

data::Batch scaled(data::Batch batch) { return {batch.data * 0.5, batch.target + 1}; }

data::Sample shaken(data::Sample sample) {
  return {sample.data + 0.1 * torch::randn_like(sample.data), sample.target};
}

// A loader with transforms, some of them random, and batches made ahead. In one process each sample
// by itself.
struct Loading : Feature {
  explicit Loading(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }

  struct Source {
    std::unique_ptr<data::Loader> loader;
    std::optional<data::Loader::Epoch> epoch;
    std::optional<data::Loader::Epoch::Iterator> at;
    int64_t epochs = 0, batches = 0;
    std::vector<data::Batch> samples;  // of the epoch, in one process
    // With lanes, on a rank.
    std::optional<data::Steps> steps;
    std::optional<data::Steps::Iterator> step;
    std::map<int, std::deque<Batch>> waiting;  // by lane
  };

  void begin(Training& training) override {
    Random random(seed);
    const auto length = training.program.parts() * random.between(4, 6) + random.below(3);
    auto generator = at::detail::createCPUGenerator(seed);
    samples = std::make_unique<data::TensorDataset>(
        at::randn({length, kFeatures}, generator, at::kDouble),
        at::randn({length}, generator, at::kDouble));
    options.batch_size = random.between(1, 3);
    options.seed = random.below(100);
    options.shuffle = random.chance(0.8);
    options.drop_last = random.chance(0.3);
    options.prefetch = random.below(4);
    if (training.program.has_layer("batch_norm") || training.program.has_layer("sync")) {
      // One sample alone has no variance.
      options.batch_size += 1;
      options.drop_last = true;
    }
    options.workers = random.below(3);
    if (random.chance(0.5)) options.transforms.emplace_back(scaled);
    if (random.chance(0.5)) options.transforms.emplace_back(shaken);
    data::LoaderOptions single = options;
    single.batch_size = 1;
    single.prefetch = single.workers = 0;
    if (training.on_rank()) options.lanes = training.program.lanes();
    sources = std::vector<Source>(training.lanes.size());
    for (size_t i = 0; i < sources.size(); ++i) {
      const auto part = part_of(training, i);
      sources[i].loader =
          std::make_unique<data::Loader>(*samples, part, training.alone ? single : options);
      batches = data::Loader(*samples, part, options).batches();
    }
  }

  void batch(Training& training, const Lane& lane, const Moment&, Batch& batch) override {
    const auto i = static_cast<size_t>(&lane - training.lanes.data());
    Source& source = sources[i];
    if (training.on_rank() && options.lanes > 0) {
      batch = next_of_lane(source, lane.rank);
      return;
    }
    if (training.on_rank()) {
      if (source.at) ++*source.at;
      if (!source.at || *source.at == std::default_sentinel) {
        source.at.reset();
        source.epoch.emplace(source.loader->epoch(source.epochs++));
        source.at.emplace(source.epoch->begin());
      }
      batch = {(**source.at).data, (**source.at).target};
      return;
    }
    const auto number = source.batches++ % batches;
    if (number == 0) {
      source.samples.clear();
      for (const auto& sample : source.loader->epoch(source.epochs++)) {
        source.samples.push_back({sample.data.clone(), sample.target.clone()});
      }
    }
    std::vector<at::Tensor> data, targets;
    for (auto at = number * options.batch_size; at < (number + 1) * options.batch_size; ++at) {
      if (at >= std::ssize(source.samples)) break;
      data.push_back(source.samples[at].data);
      targets.push_back(source.samples[at].target);
    }
    batch = {at::cat(data), at::cat(targets)};
  }

  static Shard part_of(const Training& training, size_t lane) {
    const Program& program = training.program;
    return {training.lanes[lane].rank, training.on_rank() ? program.ranks : program.parts()};
  }

  // Lanes may take different numbers of batches in a step.
  static Batch next_of_lane(Source& source, int lane) {
    auto& own = source.waiting[lane];
    if (own.empty()) {
      if (source.step) ++*source.step;
      if (!source.step || *source.step == std::default_sentinel) {
        source.step.reset();
        source.steps.emplace(source.loader->steps(source.epochs++));
        source.step.emplace(source.steps->begin());
      }
      const data::Step step = **source.step;
      for (int64_t each = step.lanes().begin; each < step.lanes().end; ++each) {
        const data::Batch& made = step.batch(each);
        source.waiting[static_cast<int>(each)].push_back({made.data, made.target});
      }
    }
    const Batch batch = own.front();
    own.pop_front();
    return batch;
  }

  uint64_t seed;
  std::unique_ptr<data::TensorDataset> samples;
  data::LoaderOptions options;
  int64_t batches = 0;  // of a rank in an epoch
  std::vector<Source> sources;
};

// Products of float32 in bfloat16.
struct Autocasting : Feature {
  explicit Autocasting(const Part&) {}
  static bool applies(const Program& program) { return program.has_layer("linear_float32"); }
  void around_forward(Training&, const std::function<void()>& forward) override {
    const parallel::Autocast autocast(at::kCPU, at::kBFloat16);
    forward();
  }
};

}  // namespace

void add_input_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<Loading>("loader", Splits::No));
  kinds.push_back(feature<Autocasting>("autocast", Splits::No));
}

}  // namespace lockstep::test::training

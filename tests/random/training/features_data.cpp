// How batches come: several a step, of unequal sizes, unequally many.
#include <torch/torch.h>

#include <optional>

#include "lockstep/parallel/global_mean.h"
#include "lockstep/parallel/join.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// Several backwards a step, all but the last under hold(). Ranks may have unequally many.
struct HeldBackwards : Feature {
  explicit HeldBackwards(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    Random random(seed);
    const int count = static_cast<int>(random.between(2, 3));
    const Program& program = training.program;
    const bool equal = random.chance(0.5) || program.has_layer("sync_batch_norm") ||
                       program.has_layer("gathered") || program.has("fsdp");
    training.micros = [=](int part) { return equal ? count : 1 + part % count; };
  }
  uint64_t seed;
};

struct TwoBackwards : Feature {
  explicit TwoBackwards(const Part&) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override { training.backwards = 2; }
};

// Ranks have batches of unequal sizes.
struct Ragged : Feature {
  explicit Ragged(const Part&) {}
  static bool applies(const Program&) { return true; }
  void batch(Training&, const Lane& lane, const Moment& moment, Batch& batch) override {
    const auto rows = std::min<int64_t>(2 + (lane.rank + moment.step) % 2, batch.data.size(0));
    batch = {batch.data.narrow(0, 0, rows), batch.target.narrow(0, 0, rows)};
  }
};

// Ranks run out of batches at different steps.
struct Joined : Feature {
  explicit Joined(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return program.ranks > 1; }
  void plan(Training& training) override {
    Random random(seed);
    options.divisor = random.chance(0.5) ? parallel::Divisor::Active : parallel::Divisor::World;
    const Program& program = training.program;
    if (program.has("global_mean")) options.divisor = parallel::Divisor::World;
    training.rules.divides_by_active = options.divisor == parallel::Divisor::Active;
    // What else communicates, or changes gradients before a divided optimizer's step, is for
    // finish() to repeat.
    rest = random.chance(0.5) && !program.has("two_backwards") && !program.has("backward_twice");
    for (const std::string_view name :
         {"global_mean", "grad_scaler", "plateau", "averager", "schedule", "clip_norm",
          "clip_value", "update_batch_norm"}) {
      rest = rest || program.has(name);
    }
    training.rules.everybody_rests = rest;
    training.rules.everybody_updates = rest || program.has("zero");
  }
  void build(Training& training, Lane& lane, Net&) override {
    Random random(seed + static_cast<uint64_t>(lane.rank) + 1);
    lane.steps = static_cast<int>(random.below(training.program.steps + 1));
  }
  void begin(Training& training) override {
    if (training.alone) return;
    std::vector<std::reference_wrapper<parallel::Joinable>> joinables;
    for (auto& model : training.lanes[0].models) joinables.emplace_back(*model.ddp);
    for (auto& model : training.lanes[0].models) {
      if (model.zero && !rest) joinables.emplace_back(*model.zero);
    }
    join.emplace(std::move(joinables), options);
  }
  void after_step(Training& training) override {
    if (training.active().empty()) return;
    present.clear();
    for (const Lane* lane : training.active()) present.push_back(lane->rank);
  }
  void end(Training& training) override {
    if (join && rest) {
      join->finish([&] {
        rest_of_step(training);
        ++training.step;
      });
    } else if (join) {
      join->finish();
    } else if (!present.empty()) {
      take_over(training, present);
    }
  }
  uint64_t seed;
  parallel::JoinOptions options;
  std::optional<parallel::Join> join;
  bool rest = false;
  std::vector<int> present;  // in the last step
};

// Losses are sums; gradients become those of the mean over all samples of all ranks.
struct GlobalMeans : Feature {
  explicit GlobalMeans(const Part&) {}
  static bool applies(const Program&) { return true; }
  void begin(Training& training) override {
    for (size_t i = 0; i < training.lanes.size(); ++i) means.emplace_back(training.group);
  }
  void loss(Training& training, Lane& lane, const at::Tensor& each, at::Tensor& loss) override {
    loss = loss * each.size(0);
    means[&lane - training.lanes.data()].add(each.size(0));
    count += each.size(0);
  }
  void after_backward(Training& training) override {
    for (size_t i = 0; i < training.lanes.size(); ++i) {
      const auto parameters = training.lanes[i].parameters();
      if (training.on_rank()) {
        means[i].scale_gradients_(parameters);
        continue;
      }
      const at::NoGradGuard no_grad;
      std::vector<const void*> done;
      for (const auto& parameter : parameters) {
        const void* key = parameter.unsafeGetTensorImpl();
        if (!parameter.grad().defined() || std::ranges::count(done, key)) continue;
        done.push_back(key);
        parameter.mutable_grad().mul_(static_cast<double>(training.lanes.size()) /
                                      static_cast<double>(count));
      }
    }
    count = 0;
  }
  std::vector<parallel::GlobalMean> means;
  int64_t count = 0;
};

}  // namespace

void add_data_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<HeldBackwards>("hold", Splits::No));
  kinds.push_back(feature<TwoBackwards>("two_backwards", Splits::Yes));
  kinds.push_back(feature<Ragged>("ragged", Splits::No));
  kinds.push_back(feature<Joined>("join", Splits::No));
  kinds.push_back(feature<GlobalMeans>("global_mean", Splits::No));
}

}  // namespace lockstep::test::training

// Averages of parameters: of ranks that train by themselves for some steps, or of ranks that are
// alike.
#include <torch/torch.h>

#include <bit>

#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/hooks.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// After every `period`-th step all ranks; at `in_pairs` two ranks each after each other step.
class Averages {
 public:
  Averages(Training& training, int64_t period, bool in_pairs)
      : period_(in_pairs ? 2 * period : period), in_pairs_(in_pairs) {
    if (training.alone) return;
    const Group& group = training.group;
    std::vector<parallel::AverageLevel> levels{{.group = group, .period = period_}};
    if (in_pairs) levels.insert(levels.begin(), {.group = group.split(group.rank() / 2)});
    for (const auto& model : training.lanes[0].models) {
      averagers_.push_back(std::make_unique<parallel::Averager>(*model.net, levels));
    }
  }
  void step(Training& training) {
    for (auto& averager : averagers_) averager->step();
    if (!training.alone) return;
    if (++steps_ % period_ == 0) {
      average_parameters(training, /*ranks=*/0);
    } else if (in_pairs_) {
      average_parameters(training, /*ranks=*/2);
    }
  }

 private:
  int64_t period_, steps_ = 0;
  bool in_pairs_;
  std::vector<std::unique_ptr<parallel::Averager>> averagers_;
};

// Ranks train by themselves, or in pairs, and average their parameters now and then.
struct LocalSteps : Feature {
  explicit LocalSteps(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    Random random(seed);
    // With a Join its silence is refused, which is to happen in the first pass.
    const auto start = training.program.has("join") ? 0 : random.between(0, 2);
    period = random.between(1, 2);
    averages_in_pairs = random.chance(0.4);
    const bool trains_in_pairs = random.chance(0.3);
    training.rules.local_from = static_cast<int>(start);
    training.rules.local_ranks = trains_in_pairs ? 2 : 1;
    training.hook = [&training, start, trains_in_pairs] {
      parallel::LocalSgdOptions options{.start_iteration = start};
      const Group& group = training.group;
      if (trains_in_pairs) options.subgroup = group.split(group.rank() / 2);
      return std::make_shared<parallel::LocalSgd>(options);
    };
  }
  void begin(Training& training) override {
    // With a Join this is refused.
    if (!training.program.has("join")) averages.emplace(training, period, averages_in_pairs);
  }
  void after_step(Training& training) override {
    if (averages) averages->step(training);
  }
  uint64_t seed;
  int64_t period = 1;
  bool averages_in_pairs = false;
  std::optional<Averages> averages;
};

// Of parameters that are alike, which stay so. The average of three or five equal numbers is
// rounded, which a layer with a narrow dtype makes a difference that can be seen.
struct Averaging : Feature {
  explicit Averaging(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) {
    return std::has_single_bit(static_cast<unsigned>(program.ranks)) ||
           (!program.has_layer("linear_") && !program.has_layer("complex"));
  }
  void begin(Training& training) override {
    averages.emplace(training, /*period=*/1 + Random(seed).below(2), Random(seed + 1).chance(0.5));
  }
  void after_step(Training& training) override { averages->step(training); }
  uint64_t seed;
  std::optional<Averages> averages;
};

}  // namespace

void add_averaging_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<LocalSteps>("local_sgd", Splits::No));
  kinds.push_back(feature<Averaging>("averager", Splits::Yes));
}

}  // namespace lockstep::test::training

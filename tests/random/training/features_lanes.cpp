// A step's batch in lanes: the same bits on any number of ranks.
#include <torch/torch.h>

#include "lockstep/parallel/lanes.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// The part's seed is the number of lanes.
struct Lanes : Feature {
  explicit Lanes(const Part&) {}
  static bool applies(const Program& program) {
    return program.lanes() == 0 || program.ranks <= program.lanes();
  }
  void plan(Training& training) override { training.options.lanes = training.program.lanes(); }
};

}  // namespace

namespace {

template <class Parallel>
void run(Training& training, std::unique_ptr<Parallel> Model::*parallel) {
  Lane& own = training.lanes[0];
  auto& models = own.models;
  const int rank = own.rank;
  const size_t known = own.losses.size();
  parallel::LaneMean mean(*(models[0].*parallel));
  const StepKey key{.seed = training.program.seed, .step = training.step};
  for (const lockstep::Lane lane :
       training.models == 1 ? (models[0].*parallel)->lanes(key)
                            : (models[0].*parallel)->lanes(key, *(models[1].*parallel))) {
    own.rank = static_cast<int>(lane.index);
    for (training.round = training.micros(own.rank); training.round-- > 0;) {
      const int round = training.round;
      for (int backward = 0; backward < training.backwards; ++backward) {
        const bool is_last = round == 0 && backward + 1 == training.backwards;
        std::vector<parallel::Hold> holds;
        at::Tensor sum;
        for (int model = 0; model < training.models; ++model) {
          training.model = model;
          if (!is_last) holds.push_back(models[static_cast<size_t>(model)].hold());
          auto loss = losses(training, {&own}, static_cast<size_t>(model),
                             round + 10 * backward + 50 * model);
          if (training.program.has("two_forwards")) {
            loss = loss + losses(training, {&own}, static_cast<size_t>(model),
                                 round + 10 * backward + 50 * model + 25);
          }
          mean.add(loss.detach().to(at::kDouble));
          if (training.is_joint && !add_to(sum, loss, training)) continue;
          bool done = false;
          for (const auto& feature : training.features) {
            done = done || feature->backward(training, loss);
          }
          if (!done) loss.backward();
        }
      }
    }
  }
  own.rank = rank;
  own.losses.resize(known);
  own.losses.push_back(mean.mean());
}

}  // namespace

void run_lanes(Training& training) {
  training.sharding ? run(training, &Model::fsdp) : run(training, &Model::ddp);
}

void add_lane_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<Lanes>("lanes", Splits::Yes));
}

}  // namespace lockstep::test::training

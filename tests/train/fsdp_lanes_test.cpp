// A Trainer with lanes whose model is divided: one hash for every number of ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "lanes/training.h"
#include "lockstep/train/metrics.h"
#include "parallel/optim/optimizer_pieces.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "train/net.h"

namespace lockstep {
namespace {

using test::chained;
using test::divided;
using test::Division;
using test::Features;
using test::Folder;
using test::result_of;
using test::TrainNet;
using train::Trainer;
using train::TrainerOptions;

uint64_t hash_of_number(double value) {
  return parallel::fingerprint(at::tensor({value}, at::kDouble));
}

// The loss of every step from the first that this run made.
struct LossesHashed : train::Callback {
  void on_step_end(const train::RunState& state, train::Requests&) override {
    sum = chained(sum, hash_of_number(state.loss));
  }
  uint64_t sum = 1;
};

// What an optimizer keeps of a parameter, put together from all ranks' parts.
uint64_t hash_of_optimizer(Trainer& trainer, const torch::nn::Module& net, const Group& group) {
  std::map<std::string, parallel::FsdpShard> parts;
  if (auto* const fsdp = trainer.fsdp()) {
    for (const auto& shard : fsdp->shards()) parts[shard.name] = shard;
  } else {
    for (const auto& item : net.named_parameters()) parts[item.key()].shard = item.value();
  }
  const auto& states = trainer.optimizer().state();
  uint64_t sum = 1;
  for (const auto& item : net.named_parameters()) {
    const parallel::FsdpShard& part = parts.at(item.key());
    std::map<std::string, at::Tensor> pieces;
    const auto found = states.find(part.shard.unsafeGetTensorImpl());
    if (found != states.end()) {
      for (const auto& piece : parallel::pieces_of(*found->second))
        pieces[piece.name] = piece.tensor;
    }
    for (const char* name : {"exp_avg", "exp_avg_sq", "momentum_buffer"}) {
      const at::Tensor whole = at::zeros({item.value().numel()});
      if (pieces.contains(name)) {
        whole.narrow(0, part.begin, part.shard.numel()).copy_(pieces[name].flatten());
      }
      if (trainer.fsdp() != nullptr) group.all_reduce(whole).wait();
      sum = chained(sum, parallel::fingerprint(whole));
    }
  }
  return sum;
}

// Parameters, buffers, the optimizer's state, losses and metrics.
uint64_t trained_to_hash(World& world, TrainerOptions options, Division division) {
  seed_everything(1, world);
  TrainNet net;
  options.fsdp = divided(division);
  static const auto samples = test::train_samples(113), held_out = test::train_samples(31, 6);
  options.evaluation = {.data = held_out, .metrics = {std::make_shared<Accuracy>()}};
  const auto losses = std::make_shared<LossesHashed>();
  options.callbacks.push_back(losses);
  Trainer trainer(world, net, train::cross_entropy(), samples, options);
  const auto outcome = trainer.run();
  uint64_t sum = chained(losses->sum, hash_of_optimizer(trainer, *net, world.group()));
  for (const auto& [name, value] : outcome.state.metrics) sum = chained(sum, hash_of_number(value));
  if (auto* const fsdp = trainer.fsdp()) return chained(sum, fsdp->fingerprint());
  return chained(sum, trainer.ddp().fingerprint());
}

class DividedLanes : public testing::TestWithParam<Features> {};

INSTANTIATE_TEST_SUITE_P(
    Features, DividedLanes,
    testing::Values(Features{{"lanes"}},
                    Features{{"lanes", "accumulation", "average", "bf16", "clip", "sgd"}},
                    Features{{"lanes", "accumulation", "fp16", "scaling", "drop_last"}}),
    [](const auto& test) { return test.param.text(); });

TEST_P(DividedLanes, LeaveOneHashOnAnyNumberOfRanks) {
  const auto options = test::train_options(GetParam());
  const auto left = [&](int ranks, Division division) {
    return result_of({"auto", ranks},
                     [&](World& world) { return trained_to_hash(world, options, division); });
  };
  // The norm of parts is added up in another order than that of whole gradients.
  const uint64_t expected = left(1, GetParam().has("clip") ? Division::Shared : Division::None);
  EXPECT_NE(expected, 0u);
  for (const int ranks : {1, 2, 3}) EXPECT_EQ(left(ranks, Division::Shared), expected) << ranks;
  for (const int ranks : {2, 3}) EXPECT_EQ(left(ranks, Division::Gathered), expected) << ranks;
}

// A run that is killed again and again, and goes on with another number of ranks each time.
TEST(DividedLanes, GoOnWithOtherNumbersOfRanksAtEveryResume) {
  struct Leg {
    int ranks;
    Division division;
    int64_t until;  // the step at which it is killed
  };
  using enum Division;
  const std::vector<Leg> legs = {
      {2, None, 5}, {3, Shared, 10}, {1, None, 11}, {2, Gathered, 16}, {4, Shared, 19}};
  const Folder folder;
  const auto leave = [&](World& world, const std::string& name, const Leg& leg) {
    auto options = test::train_options({{"lanes", "cosine", "fp16"}});
    options.epochs = 4;
    options.saving = {.directory = folder / name, .every_steps = 3, .keep_last = 2, .async = false};
    options.callbacks = {std::make_shared<test::AtStep>(leg.until, [] { raise(SIGKILL); })};
    return trained_to_hash(world, options, leg.division);
  };
  const auto killed = [&](const std::string& name, const Leg& leg) {
    std::vector<int> all(leg.ranks);
    std::iota(all.begin(), all.end(), 0);
    test::spawn(leg.ranks, [&](World& world) { leave(world, name, leg); }, {.doomed = all});
  };
  const auto finished = [&](const std::string& name, const Leg& leg) {
    return result_of({"auto", leg.ranks}, [&](World& world) { return leave(world, name, leg); });
  };
  for (const Leg& leg : legs) killed("rough", leg);
  // Undisturbed up to the checkpoint that the last run of the others starts from.
  killed("calm", {.ranks = 1, .division = None, .until = legs.back().until});
  const uint64_t expected = finished("calm", {.ranks = 1, .division = None, .until = -1});
  EXPECT_NE(expected, 0u);
  EXPECT_EQ(finished("rough", {.ranks = 3, .division = Gathered, .until = -1}), expected);
}

}  // namespace
}  // namespace lockstep

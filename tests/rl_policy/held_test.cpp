// Replay that only holds the policy near what it was: of a learner, and of a run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "even_course.h"
#include "lockstep/core/error.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/run.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

rl::LearnerOptions two_of_a_group() {
  return {.norm = rl::LossNorm::Sequence, .group_size = 2, .learning_rate = 1e-2, .lanes = 2};
}

models::Transformer small_net() {
  torch::manual_seed(1);
  return models::Transformer({.vocabulary = 20,
                              .layers = 1,
                              .hidden = 16,
                              .heads = 2,
                              .max_length = 16,
                              .initial_deviation = 0.3});
}

// Two groups of two episodes, each of them in a lane of its own.
rl::Rollout two_groups(const comm::Group& group, std::vector<double> rewards,
                       std::vector<uint8_t> held) {
  rl::Rollout out{.held = std::move(held)};
  for (const double reward : rewards) out.outcomes.push_back({.reward = reward, .own_tokens = 3});
  const auto own = Shard{group.rank(), group.size()}.of(2);
  for (int64_t lane = own.begin; lane < own.end; ++lane) {
    const auto first = static_cast<int32_t>(lane * 2);
    out.numbers.push_back({static_cast<size_t>(first), static_cast<size_t>(first) + 1});
    out.episodes.emplace_back();
    for (const int32_t number : {first, first + 1}) {
      out.episodes.back().push_back(
          {.tokens = {.ids = {1, number + 2, 7, number + 9}, .own = {0, 1, 1, 1}}});
    }
  }
  return out;
}

TEST(Held, EpisodesRewardsCountForNothing) {
  spawn(2, [](World& world) {
    // What becomes of the policy after two steps, the second of them away from the reference.
    const auto after = [&](const std::vector<double>& rewards, const std::vector<uint8_t>& held,
                           rl::ScaleRewards scale) {
      auto options = two_of_a_group();
      options.scale = scale;
      auto net = small_net();
      rl::Learner learner(net, world.group(), options);
      for (int64_t step = 0; step < 2; ++step)
        learner.learn(two_groups(world.group(), rewards, held), step);
      return learner.fingerprint();
    };
    for (const auto scale : {rl::ScaleRewards::Std, rl::ScaleRewards::Batch}) {
      const auto held = after({1, 0, 1, 0}, {0, 0, 1, 1}, scale);
      EXPECT_EQ(after({1, 0, 0, 9}, {0, 0, 1, 1}, scale), held);
      EXPECT_EQ(after({1, 0, 4, 4}, {0, 0, 1, 1}, scale), held);  // nor are equal ones dropped
      EXPECT_NE(after({1, 0, 1, 0}, {}, scale), held);
      EXPECT_NE(after({0, 1, 1, 0}, {0, 0, 1, 1}, scale), held);
    }
  });
}

TEST(Held, ThePolicyComesBackToTheReference) {
  spawn(2, [](World& world) {
    auto net = small_net();
    rl::Learner learner(net, world.group(), two_of_a_group());
    const auto away = two_groups(world.group(), {1, 0, 1, 0}, {});
    for (int64_t step = 0; step < 10; ++step) learner.learn(away, step);
    const auto back = two_groups(world.group(), {1, 0, 1, 0}, {1, 1, 1, 1});
    const auto first = learner.learn(back, 10);
    EXPECT_GT(first.kl, 0.05);
    EXPECT_EQ(first.kept, 4);
    EXPECT_EQ(first.equal_share, 0);
    for (int64_t step = 11; step < 60; ++step) learner.learn(back, step);
    EXPECT_LT(learner.learn(back, 60).kl, 0.1 * first.kl);
  });
}

TEST(Held, NeedAReference) {
  isolated([] {
    auto options = two_of_a_group();
    options.grpo.beta = 0;
    auto net = small_net();
    const World solo = World::solo();
    rl::Learner learner(net, solo.group(), options);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  learner.learn(two_groups(solo.group(), {1, 0, 1, 0}, {0, 0, 1, 1}), 0);
                }),
                HasSubstr("without GRPO, or with beta 0"));
  });
}

RunOptions with_kl(const std::string& folder) {
  auto o = options(folder);
  o.replay_mode = "kl";
  return o;
}

TEST(Held, ReplayHasTheSameBitsOnAnyNumberOfRanks) {
  const Folder folder;
  const Left one = left_by_ranks(1, with_kl(folder / "1"));
  EXPECT_EQ(left_by_ranks(3, with_kl(folder / "3")), one);
  const Left tasks = left_by_ranks(1, options(folder / "tasks"));
  EXPECT_NE(tasks.fingerprint, one.fingerprint);
}

TEST(Held, ReplayThatHoldsNothingIsRefused) {
  const Folder folder;
  isolated([&] {
    const auto refused = [&](const std::function<void(RunOptions&)>& change) {
      auto o = with_kl(folder / "run");
      change(o);
      return message_of<ConfigError>([&] { rl::run_continual(World::solo(), course(), o); });
    };
    const auto needs =
        HasSubstr("--replay-mode kl needs --replay above 0, GRPO and --beta above 0");
    EXPECT_THAT(refused([](RunOptions& o) { o.beta = 0; }), needs);
    EXPECT_THAT(refused([](RunOptions& o) { o.use_grpo = false; }), needs);
    EXPECT_THAT(refused([](RunOptions& o) { o.replay = 0; }), needs);
    EXPECT_THAT(refused([](RunOptions& o) { o.replay_mode = "KL"; }),
                HasSubstr("--replay-mode KL has to be tasks or kl"));
  });
}

}  // namespace
}  // namespace lockstep::test

// Episodes whose environments died, and rollouts that a learner cannot take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/rollout.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "rl/run/record.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using rl::End;
using rl::Message;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

models::Transformer tiny_net(int64_t vocabulary = 20) {
  torch::manual_seed(1);
  return models::Transformer({.vocabulary = vocabulary,
                              .layers = 1,
                              .hidden = 16,
                              .heads = 2,
                              .max_length = 512,
                              .initial_deviation = 0.3});
}

struct Told {
  double reward = 0;
  End end = End::UserStop;
  int32_t says = 0;
};
constexpr End kDead = End::EnvError;

// Groups one after another, as run_rollout() divides them.
rl::Rollout rollout_of(const comm::Group& group, const std::vector<Told>& told, int64_t group_size,
                       int64_t lanes) {
  rl::Rollout out;
  for (const auto& one : told) {
    out.outcomes.push_back(
        {.reward = one.reward, .end = static_cast<double>(one.end), .own_tokens = 3});
  }
  const auto own = Shard{group.rank(), group.size()}.of(lanes);
  for (int64_t lane = own.begin; lane < own.end; ++lane) {
    out.numbers.emplace_back();
    out.episodes.emplace_back();
    for (size_t i = 0; i < told.size(); ++i) {
      if (static_cast<int64_t>(i) / group_size % lanes != lane) continue;
      out.numbers.back().push_back(i);
      out.episodes.back().push_back(
          {.tokens = {.ids = {1, told[i].says + 2, 7, told[i].says + 9}, .own = {0, 1, 1, 1}}});
    }
  }
  return out;
}

struct After {
  uint64_t fingerprint = 0;
  rl::Learnt learnt = {};
};

// Two steps, the second of them away from the reference.
After after(const comm::Group& group, const std::vector<Told>& told, rl::LearnerOptions options) {
  options.learning_rate = 1e-2;
  options.lanes = 2;
  auto net = tiny_net();
  rl::Learner learner(net, group, options);
  After out;
  for (int64_t step = 0; step < 2; ++step) {
    out.learnt = learner.learn(rollout_of(group, told, options.group_size, 2), step);
  }
  out.fingerprint = learner.fingerprint();
  return out;
}

TEST(Lost, EpisodesAreLearntFromAsIfTheyHadNotBeen) {
  std::set<uint64_t> fingerprints;
  const std::vector<Told> with = {{1, End::UserStop, 0}, {9, kDead, 5},
                                  {0, End::TooLong, 1},  {0, kDead, 6},
                                  {0, End::UserStop, 2}, {1, End::UserStop, 3}};
  const std::vector<Told> without = {with[0], with[2], with[4], with[5]};
  for (const int ranks : {1, 2}) {
    spawn(ranks, [&](World& world) {
      for (const auto scale :
           {rl::ScaleRewards::Std, rl::ScaleRewards::None, rl::ScaleRewards::Batch}) {
        for (const auto norm : {rl::LossNorm::Token, rl::LossNorm::Sequence}) {
          const auto lost =
              after(world.group(), with, {.norm = norm, .scale = scale, .group_size = 3});
          const auto none =
              after(world.group(), without, {.norm = norm, .scale = scale, .group_size = 2});
          EXPECT_EQ(lost.fingerprint, none.fingerprint);
          EXPECT_EQ(lost.learnt.reward, 0.5);
          EXPECT_EQ(lost.learnt.kept, 4);
          EXPECT_EQ(lost.learnt.tokens, 12);
          EXPECT_EQ(lost.learnt.equal_share, 0);
          EXPECT_TRUE(lost.learnt.updated);
        }
      }
    });
  }
}

TEST(Lost, AGroupOfOneOrNoneHasNoAdvantage) {
  spawn(2, [](World& world) {
    const std::vector<Told> told = {{1},        {0, kDead}, {0, kDead},
                                    {0, kDead}, {0, kDead}, {0, kDead}};
    const auto dropped = after(world.group(), told, {.group_size = 3});
    EXPECT_FALSE(dropped.learnt.updated);
    EXPECT_EQ(dropped.learnt.reward, 1);
    EXPECT_EQ(dropped.learnt.equal_share, 1);
    EXPECT_EQ(dropped.learnt.kept, 0);
    const auto kept = after(world.group(), told, {.group_size = 3, .drop_equal_groups = false});
    EXPECT_EQ(kept.learnt.kept, 1);
    const auto nothing = after(world.group(), std::vector<Told>(6, {1, kDead}),
                               {.use_grpo = false, .group_size = 3});
    EXPECT_FALSE(nothing.learnt.updated);
    EXPECT_EQ(nothing.learnt.reward, 0);
  });
}

TEST(Lost, EpisodesAreInNoFigureOfAnIteration) {
  rl::Rollout rollout;
  rollout.outcomes = {{.reward = 1, .end = 2, .turns = 4, .own_tokens = 6, .state = 1},
                      {.end = static_cast<double>(kDead), .turns = 1, .own_tokens = 100}};
  const rl::RolloutPlan plan{.episodes = {{{"a", "train", "0"}}, {{"a", "train", "0"}}}};
  EXPECT_EQ(rl::own_reward(rollout, plan, {.domain = "a"}), 1);
  const auto figures = rl::figures_of(rollout, {}, 0);
  EXPECT_EQ(figures.at("reward/state"), 1);
  EXPECT_EQ(figures.at("turns"), 4);
  EXPECT_EQ(figures.at("longest"), 6);
}

// Task "1" dies as it begins.
class FrailWorld : public rl::Environment {
 public:
  rl::Scene reset(const rl::TaskKey& key, uint64_t) override {
    if (key.id == "1") throw rl::EnvironmentError("[test] it died");
    return {.task = key};
  }
  Message call(const rl::ToolCall&) override { return {.role = rl::Role::Tool, .error = true}; }
  rl::Reward evaluate(std::span<const Message>, End) override { return {}; }
  std::string state_hash() const override { return ""; }
};

class FrailDomain : public rl::Domain {
 public:
  std::string name() const override { return "frail"; }
  std::vector<rl::TaskKey> tasks(std::string_view) const override { return {}; }
  std::unique_ptr<rl::Environment> make() const override { return std::make_unique<FrailWorld>(); }
  std::vector<rl::ToolCall> gold_calls(const rl::TaskKey&) const override { return {}; }
};

class Talker : public rl::UserSimulator {
 public:
  Message next(const rl::Scene&, std::span<const Message>, uint64_t) override {
    return {.role = rl::Role::User, .content = "so"};
  }
};

text::Tokenizer tokenizer() {
  text::TrainerOptions options{.vocabulary = 264};
  options.added = {{"<|im_start|>"}, {"<|im_end|>"}, {"<tool_call>"}, {"</tool_call>"}};
  const std::vector<std::string_view> lines = {"so it is"};
  return text::train_tokenizer(lines, options);
}

std::vector<rl::Planned> frail_tasks(const std::vector<std::string>& ids) {
  std::vector<rl::Planned> out;
  for (const auto& id : ids) out.push_back({{"frail", "train", id}, out.size()});
  return out;
}

// A net that draws every token equally often, so that some messages are soon over.
template <class User = Talker>
std::vector<rl::Played> played_by_chance(const rl::AgentText& text,
                                         const std::vector<rl::Planned>& episodes,
                                         const User& user = {}) {
  const auto tokens = tokenizer();
  auto net = tiny_net(static_cast<int64_t>(tokens.size()));
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.zero_();
  const rl::Arenas arenas{
      {"frail", {std::make_shared<FrailDomain>(), [&] { return std::make_unique<User>(user); }}}};
  return rl::roll_out(net, tokens, text, arenas, episodes,
                      {.limits = {.max_turns = 3,
                                  .max_new_tokens = 200,
                                  .context = 512,
                                  .malformed = rl::Malformed::Reported}});
}

TEST(Lost, WorldsThatDieAsTheyBeginAskTheAgentForNothing) {
  isolated([] {
    auto text = rl::chat_text();
    std::vector<std::string> asked;
    text.prompt = [&](const rl::Scene& scene, std::span<const Message>) {
      asked.push_back(scene.task.id);
      return std::string("so");
    };
    const auto played = played_by_chance(text, frail_tasks({"1", "0", "1", "2"}));
    EXPECT_THAT(asked, ElementsAre("0", "2"));
    ASSERT_EQ(played.size(), 4U);
    for (const size_t dead : {0, 2}) {
      EXPECT_EQ(played[dead].end, kDead);
      EXPECT_EQ(played[dead].reward.note, "[test] it died");
      EXPECT_TRUE(played[dead].tokens.ids.empty() && played[dead].tokens.own.empty());
    }
    for (const size_t alive : {1, 3}) {
      EXPECT_NE(played[alive].end, kDead);
      EXPECT_EQ(played[alive].planned.key, alive);
      EXPECT_GT(played[alive].own_tokens(), 0);
    }
    EXPECT_EQ(played_by_chance(text, frail_tasks({"1"})).at(0).end, kDead);
  });
}

// A user who leaves before the agent has spoken, of task "2".
class Leaver : public rl::UserSimulator {
 public:
  Message next(const rl::Scene& scene, std::span<const Message>, uint64_t) override {
    return {.content = scene.task.id == "2" ? std::string(rl::kStop) : "so"};
  }
};

TEST(Lost, AnEpisodeThatIsOverAsItBeginsAsksTheAgentForNothing) {
  isolated([] {
    const auto played = played_by_chance(rl::chat_text(), frail_tasks({"0", "2"}), Leaver());
    EXPECT_GT(played[0].own_tokens(), 0);
    EXPECT_EQ(played[1].end, End::UserStop);
    EXPECT_EQ(played[1].log.size(), 1U);
    EXPECT_TRUE(played[1].tokens.ids.empty());
  });
}

TEST(Lost, EpisodesWithoutATokenTeachNothing) {
  spawn(2, [](World& world) {
    auto net = tiny_net();
    rl::Learner learner(net, world.group(), {.group_size = 2, .lanes = 2});
    auto rollout = rollout_of(world.group(), {{1}, {0}, {1}, {0}}, 2, 2);
    for (const size_t silent : {2, 3}) rollout.outcomes[silent].own_tokens = 0;
    if (world.rank() == 1) {
      for (auto& played : rollout.episodes[0]) played.tokens = {};
    }
    const auto learnt = learner.learn(rollout, 0);
    EXPECT_TRUE(learnt.updated);
    EXPECT_EQ(learnt.tokens, 6);
    EXPECT_GT(learnt.gradient_norm, 0);
  });
}

TEST(Lost, EnvironmentsThatDieWithoutAWordEndTheRunToo) {
  spawn(2, [](World& world) {
    const auto rollout = rollout_of(world.group(), {{0, kDead}, {1}}, 1, 2);
    EXPECT_THAT(message_of<Error>([&] { rl::check_environments(rollout, "", world.group()); }),
                HasSubstr("the environments of 1 of 2 episodes died, the last one: said nothing"));
  });
}

TEST(Lost, EpisodesOfABaselineAreWarnedOf) {
  spawn(2, [](World& world) {
    rl::Course course;
    course.arenas["frail"] = {std::make_shared<FrailDomain>(),
                              [] { return std::make_unique<Talker>(); }};
    const auto said = [&](const std::vector<std::string>& ids) {
      testing::internal::CaptureStderr();
      rl::scripted(course, {.episodes = frail_tasks(ids)}, {}, world.group(),
                   [](const auto&) { return std::vector<std::string>{"Done."}; });
      return testing::internal::GetCapturedStderr();
    };
    const auto warned = said({"0", "1", "2", "1"});
    if (world.rank() == 0) {
      EXPECT_THAT(warned, AllOf(HasSubstr("in a baseline the environments of 2 of 4 episodes died"),
                                HasSubstr("the last one: [test] it died")));
    } else {
      EXPECT_EQ(warned, "");
    }
    EXPECT_EQ(said({"0", "2"}), "");
  });
}

TEST(Rollout, NeedsATextBetweenMessages) {
  isolated([] {
    auto text = rl::chat_text();
    text.answer = [](auto) { return std::string(); };
    EXPECT_THAT(message_of<ConfigError>([&] {
                  played_by_chance(text, frail_tasks(std::vector<std::string>(16, "0")));
                }),
                AllOf(HasSubstr("frail/train/0"), HasSubstr("AgentText::answer returned no text")));
  });
}

TEST(Rollout, NeedsWorldsUsersAndRewardsThatArePossible) {
  isolated([] {
    const auto tokens = tokenizer();
    auto net = tiny_net(static_cast<int64_t>(tokens.size()));
    const auto said = [&](const rl::AgentText& text, const rl::Arena& arena) {
      return message_of<ConfigError>([&] {
        rl::roll_out(net, tokens, text, {{"frail", arena}}, frail_tasks({"0"}),
                     {.limits = {.max_turns = 1, .max_new_tokens = 2, .context = 512}});
      });
    };
    struct Nowhere : FrailDomain {
      std::unique_ptr<rl::Environment> make() const override { return nullptr; }
    };
    struct Generous : FrailDomain {
      struct World : FrailWorld {
        rl::Reward evaluate(std::span<const Message>, End) override { return {.value = 10}; }
      };
      std::unique_ptr<rl::Environment> make() const override { return std::make_unique<World>(); }
    };
    const auto text = rl::chat_text();
    const auto talker = [] { return std::make_unique<Talker>(); };
    const auto domain = std::make_shared<FrailDomain>();
    EXPECT_EQ(said(text, {domain, talker}), "nothing");
    EXPECT_THAT(said({.prompt = text.prompt}, {domain, talker}), HasSubstr("AgentText lacks"));
    EXPECT_THAT(said(text, {nullptr, talker}), HasSubstr("frail/train/0: its arena lacks"));
    EXPECT_THAT(said(text, {domain, nullptr}), HasSubstr("frail/train/0: its arena lacks"));
    EXPECT_THAT(said(text, {domain, [] { return nullptr; }}), HasSubstr("returned no user"));
    EXPECT_THAT(said(text, {std::make_shared<Nowhere>(), talker}),
                HasSubstr("frail/train/0: Domain::make() returned no environment"));
    EXPECT_THAT(said(text, {std::make_shared<Generous>(), talker}),
                HasSubstr("frail/train/0 gave a reward of 10, which is not within [0, 1]"));
  });
}

TEST(Rollout, NeedsAllOfItsEpisodes) {
  spawn(2, [](World& world) {
    rl::RolloutPlan plan{.episodes = std::vector<rl::Planned>(6), .group_size = 1, .lanes = 2};
    for (const int64_t more : {-1, 1}) {
      EXPECT_THAT(message_of<ConfigError>([&] {
                    rl::run_rollout(plan, world.group(), [&](const auto& episodes) {
                      const int64_t count = std::ssize(episodes) + (world.rank() == 1 ? more : 0);
                      return std::vector<rl::Played>(static_cast<size_t>(count));
                    });
                  }),
                  HasSubstr("rank 1: play() returned " + std::to_string(3 + more) +
                            " episodes for the 3 of lane 1"));
    }
    plan.group_size = 0;
    EXPECT_THAT(message_of<ConfigError>([&] {
                  rl::run_rollout(plan, world.group(),
                                  [](const auto&) { return std::vector<rl::Played>(); });
                }),
                HasSubstr("group_size = 0"));
  });
}

// A checkpointer that knew the optimizer before it was renewed saves and restores the new one.
TEST(Learner, ARenewedOptimizerIsTheOneThatIsSaved) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const std::vector<Told> told = {{1}, {0}, {1, End::UserStop, 3}, {0, End::UserStop, 2}};
    const auto learn = [&](rl::Learner& learner, int64_t step) {
      EXPECT_TRUE(learner.learn(rollout_of(world.group(), told, 2, 2), step).updated);
      return learner.fingerprint();
    };
    const rl::LearnerOptions options{.group_size = 2, .learning_rate = 1e-2, .lanes = 2};
    auto net = tiny_net();
    rl::Learner learner(net, world.group(), options);
    checkpoint::Checkpointer checkpoints(world.group(), folder.path());
    learner.track(checkpoints);
    learn(learner, 0);
    learner.renew_optimizer(5e-2);
    learn(learner, 1);
    checkpoints.save(1);
    const auto expected = learn(learner, 2);
    auto other_net = tiny_net();
    rl::Learner other(other_net, world.group(), options);
    checkpoint::Checkpointer restoring(world.group(), folder.path());
    other.track(restoring);
    other.renew_optimizer(1e-3);
    ASSERT_TRUE(restoring.restore_latest());
    EXPECT_EQ(learn(other, 2), expected);
  });
}

TEST(Learner, RefusesRolloutsWithOtherLanesOnAllRanks) {
  spawn(2, [](World& world) {
    auto net = tiny_net();
    rl::Learner learner(net, world.group(), {.group_size = 2, .lanes = 6});
    const std::vector<Told> told = {{1}, {0}, {1}, {0}, {0}, {1}, {0}, {1}};
    const auto said = [&](const rl::Rollout& rollout) {
      return message_of<ConfigError>([&] { learner.learn(rollout, 0); });
    };
    for (const int64_t lanes : {8, 4, 1 + 1}) {
      EXPECT_THAT(said(rollout_of(world.group(), told, 2, lanes)),
                  AllOf(HasSubstr("[learner] rank 0: the rollout has " + std::to_string(lanes / 2) +
                                  " lanes of this rank, the learner 3"),
                        HasSubstr("LearnerOptions::lanes, which is 6")));
    }
    // Rank 1 has three of five lanes as of six.
    EXPECT_THAT(said(rollout_of(world.group(), told, 2, 5)),
                HasSubstr("rank 0: the rollout has 2"));
    auto rollout = rollout_of(world.group(), told, 2, 6);
    if (world.rank() == 1) rollout.episodes[0].pop_back();
    EXPECT_THAT(said(rollout), HasSubstr("rank 1: lane 0 of this rank has 1 episodes and 2"));
    rollout = rollout_of(world.group(), told, 2, 6);
    if (world.rank() == 1) rollout.numbers[0][0] = 8;
    EXPECT_THAT(said(rollout), HasSubstr("rank 1: lane 0 of this rank has episode 8"));
    EXPECT_TRUE(learner.learn(rollout_of(world.group(), told, 2, 6), 0).updated);
    for (const size_t lanes : {2, 4}) {
      const std::vector<std::vector<const models::DialogueTokens*>> batches(lanes);
      EXPECT_THAT(message_of<ConfigError>([&] { learner.imitate(batches, 1, 0); }),
                  HasSubstr(std::to_string(lanes) + " lanes; this rank has 3 of 6"));
    }
  });
}

}  // namespace
}  // namespace lockstep::test

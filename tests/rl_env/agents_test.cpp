// What simple agents score in the embedded domains: an agent that does not read what it looks up
// earns little, whatever it does. Every number is exact, since tasks are drawn from counters.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "lockstep/rl/dialogue.h"
#include "rl/embedded/task.h"

namespace lockstep::rl {
namespace {

using namespace embedded;

constexpr int64_t kPlayed = 2000;

double mean_reward(std::string_view name, const PlayOptions& options, int64_t tasks = kPlayed) {
  const EmbeddedDomain domain(name);
  double sum = 0;
  for (int64_t i = 0; i < tasks; ++i) {
    sum += play(domain, domain.task("test", i), options).reward.value;
  }
  return sum / static_cast<double>(tasks);
}

class EmbeddedAgents : public testing::TestWithParam<size_t> {
 public:
  std::string_view name() const { return kKinds[GetParam()]; }
  Kind kind() const { return static_cast<Kind>(GetParam()); }
  // This domain's of three.
  double of(const std::array<double, 3>& values) const { return values[GetParam()]; }
};

TEST_P(EmbeddedAgents, AnOracleAlwaysEarnsOne) {
  for (const int64_t difficulty : {1, 2, 3}) {
    const EmbeddedDomain domain(name(), {.difficulty = difficulty});
    for (const std::string_view split : {"train", "dev", "test"}) {
      for (int64_t i = 0; i < (difficulty == 2 ? 1000 : 300); ++i) {
        const auto dialogue = play(domain, domain.task(split, i));
        ASSERT_EQ(dialogue.reward.value, 1) << name_of(dialogue.scene.task);
        ASSERT_EQ(dialogue.why, End::UserStop);
      }
    }
  }
}

TEST_P(EmbeddedAgents, DoingNothingOrSayingAlwaysTheSameEarnsNothing) {
  EXPECT_EQ(mean_reward(name(), {.agent = Agent::Null}), 0);
  const EmbeddedDomain domain(name());
  const auto world = domain.make();
  ScriptedUser user;
  Episode episode(*world, user);
  for (int64_t constant = 0; constant < 50; ++constant) {
    // What closes another task.
    const Task other = make_task({kind(), Split::Train, constant, 2});
    const auto line = closing(other, other.clause->outcome);
    for (int64_t i = 0; i < 200; ++i) {
      episode.begin(domain.task("test", i), 0);
      episode.agent_says(line);
      ASSERT_EQ(episode.reward().value, 0) << line;
    }
  }
}

TEST_P(EmbeddedAgents, ARandomAgentEarnsLittle) {
  EXPECT_LT(mean_reward(name(), {.agent = Agent::Random}), .10);
}

TEST_P(EmbeddedAgents, TheRightFormWithoutADecisionEarnsAThird) {
  EXPECT_NEAR(mean_reward(name(), {.skill = 0}), of({.37, .32, .21}), .03);
  EXPECT_NEAR(mean_reward(name(), {.skill = .3}), of({.56, .52, .44}), .03);
  EXPECT_NEAR(mean_reward(name(), {.skill = .5}), of({.68, .66, .60}), .03);
}

// What a decision knows of a task.
int first_table(const Task& task) {
  const Record& record = task.record();
  switch (task.number.kind) {
    case Kind::Airline:
      return record.kind * 2 + record.yes;
    case Kind::Retail:
      return record.kind;
    default:
      return record.is_on * 4 + record.yes * 2 + record.roams;
  }
}

// The best decisions by what `known` sees, learnt from many training tasks, on test tasks.
template <class Known>
double best_decisions(Kind kind, const Known& known) {
  std::map<decltype(known(Task{})), std::map<Outcome, int>> seen;
  for (int64_t i = 0; i < 8000; ++i) {
    const Task task = make_task({kind, Split::Train, i, 2});
    ++seen[known(task)][task.clause->outcome];
  }
  const auto more = [](const auto& a, const auto& b) { return a.second < b.second; };
  int right = 0;
  for (int64_t i = 0; i < 3000; ++i) {
    const Task task = make_task({kind, Split::Test, i, 2});
    const auto& of = seen[known(task)];
    right +=
        !of.empty() && std::max_element(of.begin(), of.end(), more)->first == task.clause->outcome;
  }
  return right / 3000.0;
}

TEST_P(EmbeddedAgents, NeitherRequestNorFirstTableIsEnoughToDecide) {
  const auto constant = [](const Task&) { return 0; };
  EXPECT_LT(best_decisions(kind(), constant), of({.30, .40, .22}));
  const auto request = [](const Task& task) { return task.kind->request; };
  EXPECT_LT(best_decisions(kind(), request), of({.43, .41, .21}));
  const auto table = [](const Task& task) {
    return std::tuple(task.kind->request, first_table(task), task.consents);
  };
  EXPECT_LE(best_decisions(kind(), table), .70);
}

TEST_P(EmbeddedAgents, TestTasksNeedSeveralCalls) {
  const EmbeddedDomain domain(name());
  double turns = 0;
  double calls = 0;
  int64_t most = 0;
  for (int64_t i = 0; i < kPlayed; ++i) {
    int64_t own = 0;
    for (const auto& message : play(domain, domain.task("test", i)).messages) {
      own += message.role == Role::Assistant;
      calls += static_cast<double>(message.calls.size());
    }
    most = std::max(most, own);
    turns += static_cast<double>(own);
  }
  EXPECT_NEAR(turns / kPlayed, of({4.45, 4.2, 4.3}), .1);
  EXPECT_NEAR(calls / kPlayed, of({2.65, 2.25, 2.6}), .1);
  EXPECT_LE(most, 7);
}

INSTANTIATE_TEST_SUITE_P(Domains, EmbeddedAgents, testing::Values(0, 1, 2),
                         [](const auto& tested) { return std::string(kKinds[tested.param]); });

TEST(EmbeddedAgent, ASkillIsAProbability) {
  const EmbeddedDomain domain("airline");
  EXPECT_THROW(play(domain, domain.task("train", 0), {.skill = 1.1}), ConfigError);
  EXPECT_THROW(play(domain, {"retail", "train", "0"}), ConfigError);
}

}  // namespace
}  // namespace lockstep::rl

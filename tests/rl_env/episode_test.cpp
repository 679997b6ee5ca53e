// Whose turn it is, and when it is over, in a world that does what a test tells it.
#include "lockstep/rl/episode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <tuple>

#include "support/thrown.h"

namespace lockstep::rl {
namespace {

constexpr std::string_view kCall = "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>";

struct World : Environment {
  Scene reset(const TaskKey&, uint64_t) override {
    if (dies_at == "reset") throw EnvironmentError("dead");
    return {.policy = "p", .stop_tool = stop_tool, .history = history};
  }
  Message call(const ToolCall& call) override {
    if (dies_at == "call") throw EnvironmentError("dead");
    return {.content = call.name, .error = fails};
  }
  Reward evaluate(std::span<const Message> log, End why) override {
    if (dies_at == "evaluate") throw EnvironmentError("dead");
    ++evaluated;
    return {.value = why == End::UserStop || why == End::AgentStop ? most : 0.0,
            .parts = {{"messages", per_message * static_cast<double>(log.size())}}};
  }
  std::string state_hash() const override { return ""; }

  std::string dies_at;
  std::string stop_tool;
  std::vector<Message> history;
  bool fails = false;
  double most = 1, per_message = 1;
  int evaluated = 0;
};

struct User : UserSimulator {
  Message next(const Scene&, std::span<const Message> log, uint64_t) override {
    if (calls_first && (log.empty() || log.back().role != Role::Tool)) {
      return {.role = Role::User, .calls = {{.name = "phone"}}};
    }
    if (log.empty()) return {.content = "Help."};
    if (log.back().role == Role::Tool) return {.content = "Yes."};
    return {.content = log.back().content == "Bye." ? std::string(kStop) : "Go on."};
  }
  bool calls_first = false;
};

const TaskKey kTask = {.domain = "d", .split = "train", .id = "1"};

TEST(EpisodeTurns, ToolsAnswerCallsAndTheUserAnswersText) {
  World world;
  User user;
  Episode episode(world, user);
  const auto first = episode.begin(kTask, 1);
  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0].content, "Help.");
  const auto result = episode.agent_says(kCall);
  ASSERT_EQ(result.size(), 1U);
  EXPECT_EQ(result[0].role, Role::Tool);
  EXPECT_EQ(result[0].call_id, "c0");
  EXPECT_EQ(episode.agent_says("Well?").at(0).content, "Go on.");
  EXPECT_TRUE(episode.agent_says("Bye.").empty());
  EXPECT_EQ(episode.why(), End::UserStop);
  EXPECT_EQ(episode.turns(), 3);
  EXPECT_EQ(episode.calls(), 1);
  EXPECT_EQ(episode.reward().value, 1);
  EXPECT_EQ(episode.reward().parts.at("messages"), 7);
  EXPECT_EQ(world.evaluated, 1);
  EXPECT_THROW(episode.agent_says("more"), Error);
  EXPECT_EQ(episode.begin(kTask, 1).size(), 1U);
  EXPECT_FALSE(episode.over());
  EXPECT_THROW(episode.reward(), Error);
}

TEST(EpisodeTurns, TheLastTurnEndsIt) {
  World world;
  User user;
  Episode episode(world, user, {.max_turns = 3});
  episode.begin(kTask, 1);
  episode.agent_says(kCall);
  EXPECT_FALSE(episode.agent_says(kCall).empty());
  EXPECT_TRUE(episode.agent_says(kCall).empty());
  EXPECT_EQ(episode.why(), End::MaxTurns);
  EXPECT_EQ(episode.reward().value, 0);
  // A conversation that ends in the last turn has ended by itself.
  Episode two(world, user, {.max_turns = 1});
  two.begin(kTask, 1);
  two.agent_says("Bye.");
  EXPECT_EQ(two.why(), End::UserStop);
  two.begin(kTask, 1);
  two.stop(End::TooLong);
  two.stop(End::ContextFull);
  EXPECT_EQ(two.why(), End::TooLong);
}

TEST(EpisodeTurns, ErrorsAreCounted) {
  World world;
  world.fails = true;
  User user;
  Episode episode(world, user, {.max_errors = 2, .malformed = Malformed::Reported});
  episode.begin(kTask, 1);
  episode.agent_says(kCall);
  EXPECT_FALSE(episode.over());
  episode.agent_says("<tool_call>");
  EXPECT_EQ(episode.why(), End::MaxErrors);
  EXPECT_EQ(episode.errors(), 2);
}

TEST(EpisodeTurns, AMalformedMessageEndsOrIsReported) {
  World world;
  User user;
  Episode ends(world, user);
  ends.begin(kTask, 1);
  EXPECT_TRUE(ends.agent_says("<tool_call>").empty());
  EXPECT_EQ(ends.why(), End::BadCall);
  EXPECT_TRUE(ends.log().back().error);
  Episode reported(world, user, {.malformed = Malformed::Reported});
  reported.begin(kTask, 1);
  EXPECT_EQ(reported.agent_says("<tool_call>").at(0).content,
            "Error: malformed tool call: </tool_call> is missing");
  EXPECT_FALSE(reported.over());
}

TEST(EpisodeTurns, TheUserHasToolsToo) {
  World world;
  User user;
  user.calls_first = true;
  Episode episode(world, user);
  const auto seen = episode.begin(kTask, 1);
  ASSERT_EQ(seen.size(), 1U);  // the agent sees nothing of the user's calls
  EXPECT_EQ(seen[0].content, "Yes.");
  ASSERT_EQ(episode.log().size(), 3U);
  EXPECT_EQ(episode.log()[1].content, "phone");
  EXPECT_EQ(episode.log()[1].by, Party::User);
}

TEST(EpisodeTurns, AStopToolEndsItForTheAgent) {
  World world;
  world.stop_tool = "f";
  NoUser user;
  Episode episode(world, user);
  episode.begin(kTask, 1);
  EXPECT_TRUE(episode.agent_says(kCall).empty());
  EXPECT_EQ(episode.why(), End::AgentStop);
  EXPECT_EQ(episode.reward().value, 1);
}

TEST(EpisodeTurns, AHistoryMayEndWithTheUser) {
  World world;
  world.history = {{.role = Role::Assistant, .content = "Hi!"}, {.content = "My line is dead."}};
  User user;
  Episode episode(world, user);
  EXPECT_EQ(episode.begin(kTask, 1), world.history);
  EXPECT_TRUE(episode.log().empty());
}

TEST(EpisodeTurns, ADeadEnvironmentCostsTheEpisode) {
  for (const std::string at : {"reset", "call", "evaluate"}) {
    World world;
    world.dies_at = at;
    User user;
    Episode episode(world, user);
    episode.begin(kTask, 1);
    if (!episode.over()) episode.agent_says(kCall);
    if (!episode.over()) episode.agent_says("Bye.");
    EXPECT_EQ(episode.reward().value, 0) << at;
    EXPECT_EQ(episode.reward().note, "dead") << at;
    EXPECT_EQ(episode.why(), End::EnvError) << at;
    world.dies_at.clear();
    episode.begin(kTask, 1);
    EXPECT_FALSE(episode.over());
  }
}

TEST(EpisodeTurns, ARewardThatIsNotFiniteCostsTheEpisode) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinite = std::numeric_limits<double>::infinity();
  for (const auto& [most, per_message, note] :
       {std::tuple(nan, 1.0, "the environment of d/train/1 gave a reward of nan"),
        std::tuple(-infinite, 1.0, "gave a reward of -inf"),
        std::tuple(1.0, infinite, "gave a reward with messages = inf")}) {
    World world;
    world.most = most;
    world.per_message = per_message;
    User user;
    Episode episode(world, user);
    episode.begin(kTask, 1);
    episode.agent_says("Bye.");
    EXPECT_EQ(episode.reward().value, 0);
    EXPECT_THAT(episode.reward().note, testing::HasSubstr(note));
    EXPECT_TRUE(episode.reward().parts.empty());
    EXPECT_EQ(episode.why(), End::EnvError);
    EXPECT_EQ(world.evaluated, 1);
  }
}

TEST(EpisodeTurns, ARewardIsWithinZeroAndOne) {
  const auto said = [](double most) {
    World world;
    world.most = most;
    User user;
    Episode episode(world, user);
    episode.begin(kTask, 1);
    episode.agent_says("Bye.");
    return test::message_of<ConfigError>([&] { episode.reward(); });
  };
  EXPECT_THAT(said(-1), testing::HasSubstr("d/train/1 gave a reward of -1, which is not within"));
  EXPECT_THAT(said(1.5), testing::HasSubstr("gave a reward of 1.5"));
  EXPECT_EQ(said(0.3), "nothing");
  EXPECT_EQ(said(1.0000000000000002), "nothing");  // a sum of shares
}

// What is solved, or is imitated, has the reward 1.
TEST(EpisodeTurns, ARewardARoundingAwayFromZeroOrOneIsThat) {
  const auto earned = [](double most) {
    World world;
    world.most = most;
    User user;
    Episode episode(world, user);
    episode.begin(kTask, 1);
    episode.agent_says("Bye.");
    return episode.reward().value;
  };
  double sum = 0;
  for (int share = 0; share < 10; ++share) sum += 0.1;
  ASSERT_LT(sum, 1);
  EXPECT_EQ(earned(sum), 1);
  EXPECT_EQ(earned(1 + 1e-9), 1);
  EXPECT_EQ(earned(-1e-9), 0);
  EXPECT_EQ(earned(0.9999), 0.9999);
}

TEST(EpisodeTurns, LimitsAreChecked) {
  World world;
  User user;
  EXPECT_THROW(Episode(world, user, {.max_turns = 0}), ConfigError);
}

}  // namespace
}  // namespace lockstep::rl

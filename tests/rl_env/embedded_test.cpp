// The three embedded domains: tasks, tools, the customer, and what earns a reward.
#include "lockstep/rl/embedded.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <thread>

#include "core/hash/sha256.h"
#include "lockstep/rl/dialogue.h"
#include "rl/embedded/environment.h"

namespace lockstep::rl {
namespace {

using namespace embedded;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::array kAll = {Kind::Airline, Kind::Retail, Kind::Telecom};

EmbeddedDomain domain_of(Kind kind, EmbeddedOptions options = {}) {
  return EmbeddedDomain(kKinds[static_cast<size_t>(kind)], options);
}

// Everything that a task is.
std::string text_of(const Task& task) {
  std::string text = scenario_of(task);
  World world = task.world;
  for (const auto& record : task.world.records) {
    const auto id = fmt::format("{{\"id\": \"{}\"}}", record.id);
    for (const auto tool : {"get_reservation", "get_order", "get_line", "get_bill", "get_usage"}) {
      text += answer(world, tool, id).text;
    }
  }
  for (const auto& line : script(task, task.clause->outcome, Looks::AsNeeded)) text += line;
  return text;
}

std::string hash_of(Kind kind, Split split) {
  std::string text;
  for (int64_t i = 0; i < 10; ++i) text += text_of(make_task({kind, split, i, 2}));
  return sha256(text).substr(0, 16);
}

TEST(EmbeddedTasks, AreTheSameOnEveryMachine) {
  std::vector<std::string> hashes;
  for (const Kind kind : kAll) {
    for (const Split split : {Split::Train, Split::Dev, Split::Test}) {
      hashes.push_back(hash_of(kind, split));
    }
  }
  EXPECT_THAT(hashes, ElementsAre("8a151183aefb4d1e", "afcff988eaa4319c", "35d027bb25811022",
                                  "07d2690536ffb506", "7515cc8d6dcc2230", "b43dc4da5ac7f57c",
                                  "5113325c6765c82c", "8482a697c30088d6", "1cfe381a9ed9e405"));
}

TEST(EmbeddedTasks, SplitsShareNoNumber) {
  for (const Kind kind : kAll) {
    std::set<int> ids;
    std::set<int> seconds;
    for (const Split split : {Split::Train, Split::Dev, Split::Test}) {
      for (const int id : ids_of(kind, split)) EXPECT_TRUE(ids.insert(id).second) << id;
      for (const int number : seconds_of(kind, split)) EXPECT_TRUE(seconds.insert(number).second);
    }
    EXPECT_EQ(ids.size(), 900U);
    EXPECT_EQ(seconds.size(), 90U);
    EXPECT_EQ(ids_of(kind, Split::Train).size(), 540U);
    // What a task shows is of its split.
    const auto allowed = ids_of(kind, Split::Test);
    const auto numbers = seconds_of(kind, Split::Test);
    for (int64_t i = 0; i < 300; ++i) {
      const Task task = make_task({kind, Split::Test, i, 3});
      EXPECT_EQ(task.world.records.size(), 8U);
      EXPECT_EQ(task.world.seconds.size(), kind == Kind::Telecom ? 0U : 4U);
      std::set<int> own;
      for (const auto& record : task.world.records) {
        EXPECT_NE(std::find(allowed.begin(), allowed.end(), record.id), allowed.end());
        EXPECT_TRUE(own.insert(record.id).second);
      }
      EXPECT_FALSE(own.contains(task.wrong_id));
      for (const auto& second : task.world.seconds) {
        EXPECT_NE(std::find(numbers.begin(), numbers.end(), second.number), numbers.end());
      }
    }
  }
}

TEST(EmbeddedTasks, SplitsShareNoPhrasingButEveryWord) {
  for (const Kind kind : kAll) {
    for (const auto& request : requests_of(kind)) {
      std::set<std::string> train;
      std::set<std::string> words;
      for (int i = 0; i < kTrainPhrasings; ++i) {
        train.insert(phrase(request, Split::Train, i, "3"));
        std::istringstream text(phrase(request, Split::Train, i, "3"));
        for (std::string word; text >> word;) words.insert(word);
      }
      EXPECT_EQ(train.size(), 8U);
      std::set<std::string> test;
      for (int i = 0; i < kTestPhrasings; ++i) {
        const auto text = phrase(request, Split::Test, i, "3");
        EXPECT_FALSE(train.contains(text)) << text;
        test.insert(text);
        std::istringstream stream(text);
        for (std::string word; stream >> word;) EXPECT_TRUE(words.contains(word)) << word;
      }
      EXPECT_EQ(test.size(), 4U);
    }
  }
}

TEST(EmbeddedTasks, HaveKeysAndNamesOfTheirOwn) {
  const EmbeddedDomain retail("retail", {.tasks = 3});
  EXPECT_EQ(retail.tasks("train").size(), 3U);
  EXPECT_EQ(retail.tasks("all").size(), 9U);
  EXPECT_EQ(name_of(retail.task("test", 17)), "retail/test/17");
  EXPECT_EQ(name_of(retail.task("test", 17, 1)), "retail/test/17@1");
  const auto world = retail.make();
  EXPECT_NE(world->reset(retail.task("test", 5), 0).scenario,
            world->reset(retail.task("test", 5, 3), 0).scenario);
  EXPECT_THROW(EmbeddedDomain("retial"), ConfigError);
  EXPECT_THROW(EmbeddedDomain("retail", {.difficulty = 4}), ConfigError);
  EXPECT_THROW(EmbeddedDomain("retail", {.tasks = 0}), ConfigError);
  EXPECT_THROW(retail.tasks("eval"), ConfigError);
  EXPECT_THROW(retail.task("train", -1), ConfigError);
  for (const auto& key : {TaskKey{"airline", "train", "1"}, TaskKey{"retail", "train", "x"},
                          TaskKey{"retail", "train", "1@9"}, TaskKey{"retail", "", "1"}}) {
    EXPECT_THROW(world->reset(key, 0), ConfigError) << name_of(key);
  }
}

TEST(EmbeddedTasks, DifficultyOneGivesTheIdAndThreeOftenAWrongOne) {
  for (const Kind kind : kAll) {
    int withheld = 0;
    int wrong = 0;
    for (int64_t i = 0; i < 1000; ++i) {
      const Task easy = make_task({kind, Split::Train, i, 1});
      EXPECT_FALSE(easy.withholds);
      EXPECT_TRUE(easy.clause->is_plain) << easy.clause->name;
      const Task hard = make_task({kind, Split::Train, i, 3});
      withheld += hard.withholds;
      wrong += hard.wrong_id != 0;
    }
    EXPECT_NEAR(withheld, 800, 50);
    EXPECT_NEAR(wrong, 300, 50);
  }
}

TEST(EmbeddedTools, AnswerAsTheirErrorsSay) {
  World world = make_task({Kind::Airline, Split::Train, 0, 2}).world;
  const int id = world.records[0].id;
  const auto says = [&](std::string_view tool, const std::string& arguments) {
    return answer(world, tool, arguments).text;
  };
  const auto own = fmt::format("\"id\": \"{}\"", id);
  EXPECT_EQ(says("fly", "{}"), "Error: no such tool");
  EXPECT_EQ(says("get_reservation", "{}"), "Error: missing id");
  EXPECT_EQ(says("get_reservation", "{\"id\": \"99\"}"), "Error: not found");
  EXPECT_EQ(says("get_reservation", fmt::format("{{\"id\": {}}}", id)), "Error: not found");
  EXPECT_EQ(says("get_reservation", fmt::format("{{\"id\": \"0{}\"}}", id)), "Error: not found");
  EXPECT_EQ(says("get_reservation", fmt::format("{{\"id\": \" {}\"}}", id)), "Error: not found");
  EXPECT_EQ(says("get_flight", "{" + own + "}"), "Error: missing flight");
  EXPECT_EQ(says("get_flight", "{\"flight\": \"5\"}"), "Error: not found");
  EXPECT_EQ(says("add_bags", "{" + own + "}"), "Error: missing bags");
  EXPECT_EQ(says("add_bags", "{" + own + ", \"bags\": 2}"), "Error: missing bags");
  EXPECT_EQ(changed_state(world), "{}");
  EXPECT_EQ(says("add_bags", "{" + own + ", \"bags\": \"2\"}"), "ok");
  EXPECT_THAT(changed_state(world), HasSubstr("add_bags=2;"));
  EXPECT_THAT(says("get_reservation", "{" + own + "}"), HasSubstr("\"cabin\": "));
}

TEST(EmbeddedUser, AnswersWhatBelongsToTheRequest) {
  ScriptedUser user;
  const Scene scene{.scenario =
                        "request: Exchange it.\nid: 417\nfirst id: 999\nitem: 23\n"
                        "Confirm: No.\n"};
  std::vector<Message> log;
  const auto says = [&](const std::string& text) {
    log.push_back({.role = Role::Assistant, .content = text});
    log.push_back(user.next(scene, log, 0));
    return log.back().content;
  };
  EXPECT_EQ(user.next(scene, {}, 0).content, "Exchange it.");
  EXPECT_EQ(says("Which id?"), "999");
  EXPECT_EQ(says("Which id?"), "417");
  EXPECT_EQ(says("Which item?"), "23");
  EXPECT_EQ(says("Which zip?"), "I do not know.");
  EXPECT_EQ(says("How many GB?"), "I do not know.");
  EXPECT_EQ(says("Which zip? Confirm?"), "No.");
  EXPECT_EQ(says("Why?"), "I do not know.");
  EXPECT_EQ(says("Done."), kStop);
}

// Plays lines against the task, or those and what follows.
struct Played {
  Reward reward;
  End why;
  std::string hash;
};
Played played(const TaskKey& key, const std::vector<std::string>& lines) {
  const EmbeddedDomain domain(key.domain);
  const auto world = domain.make();
  ScriptedUser user;
  Episode episode(*world, user);
  episode.begin(key, 0);
  for (const auto& line : lines) {
    if (!episode.over()) episode.agent_says(line);
  }
  EXPECT_TRUE(episode.over());
  return {episode.reward(), episode.why(), world->state_hash()};
}

// The first task that `wanted` accepts, and the script that solves it.
struct Found {
  TaskKey key;
  Task task;
  std::vector<std::string> lines;
};
Found found(Kind kind, std::string_view clause) {
  for (int64_t i = 0;; ++i) {
    Task task = make_task({kind, Split::Train, i, 2});
    if (task.clause->name != clause || task.withholds) continue;
    auto lines = script(task, task.clause->outcome, Looks::AsNeeded);
    return {domain_of(kind).task("train", i), std::move(task), std::move(lines)};
  }
}

TEST(EmbeddedReward, EachDamageCostsItAndIsNamed) {
  const auto [key, task, good] = found(Kind::Airline, "upgrade/yes");
  const int id = task.record().id;
  ASSERT_EQ(good.size(), 5U);  // look, look, Confirm?, write, close
  const auto whole = played(key, good);
  EXPECT_EQ(whole.reward.value, 1);
  const auto damaged = [&](size_t at, const std::string& line) {
    auto lines = good;
    lines[at] = line;
    return played(key, lines);
  };
  const auto failed = [](const Played& result, std::string_view part) {
    EXPECT_EQ(result.reward.value, 0);
    EXPECT_EQ(result.why, End::UserStop);
    for (const auto& [name, value] : result.reward.parts) {
      EXPECT_EQ(value, name == part ? 0 : 1) << name;
    }
  };
  auto extra = good;
  extra.insert(extra.begin() + 4, call_text("transfer", fmt::format("{{\"id\": \"{}\"}}", id)));
  failed(played(key, extra), "state");
  EXPECT_NE(played(key, extra).hash, whole.hash);
  auto twice = good;
  twice.insert(twice.begin() + 4, good[3]);
  failed(played(key, twice), "state");
  failed(damaged(3, call_text("set_cabin",
                              fmt::format("{{\"id\": \"{}\", \"cabin\": \"basic\"}}", id))),
         "state");
  failed(damaged(3, call_text("get_reservation", fmt::format("{{\"id\": \"{}\"}}", id))), "state");
  auto unasked = good;
  unasked.erase(unasked.begin() + 2);
  failed(played(key, unasked), "policy");
  failed(damaged(4, "Done."), "told");
  failed(damaged(4, "Done. Ref 1."), "told");
  failed(damaged(4, "Not allowed. Ref " + std::to_string(task.record().ref) + "."), "told");
  EXPECT_EQ(damaged(3, "Now: " + good[3]).why, End::BadCall);
  EXPECT_EQ(damaged(3, good[3] + good[3]).why, End::BadCall);
  EXPECT_EQ(damaged(3, "<tool_call>{").why, End::BadCall);
  EXPECT_EQ(damaged(3, call_text("fly", "{}")).reward.parts.at("state"), 0);
  EXPECT_EQ(played(key, std::vector<std::string>(9, "Why?")).why, End::MaxTurns);
}

TEST(EmbeddedReward, ACallThatFailedHasCostNothing) {
  auto [key, task, lines] = found(Kind::Airline, "upgrade/yes");
  lines.insert(lines.begin(),
               call_text("set_cabin", fmt::format("{{\"id\": \"{}\"}}", task.record().id)));
  EXPECT_EQ(played(key, lines).reward.value, 1);
}

TEST(EmbeddedReward, AGuessedReferenceCountsForNothing) {
  const auto [key, task, good] = found(Kind::Retail, "cancel/status");
  EXPECT_EQ(played(key, good).reward.value, 1);
  const auto guessed = played(key, {good.back()});
  EXPECT_EQ(guessed.reward.value, 0);
  EXPECT_EQ(guessed.reward.parts.at("told"), 0);
  EXPECT_EQ(guessed.reward.parts.at("looked_up"), 0);
}

TEST(EmbeddedReward, DependsNeitherOnOrderNorOnThread) {
  constexpr int64_t kTasks = 1000;
  const auto play_all = [&](int64_t step) {
    std::vector<std::string> hashes(kTasks);
    for (int64_t i = 0; i < kTasks; ++i) {
      const int64_t index = i * step % kTasks;
      const auto domain = domain_of(kAll[static_cast<size_t>(index % 3)]);
      const auto dialogue = play(domain, domain.task("test", index), {.skill = .5, .seed = 7});
      std::string text = name_of(dialogue.scene.task) + std::to_string(dialogue.reward.value);
      for (const auto& message : dialogue.messages) text += message.content;
      hashes[static_cast<size_t>(index)] = sha256(text);
    }
    return hashes;
  };
  const auto in_order = play_all(1);
  std::vector<std::string> other;
  std::thread thread([&] { other = play_all(7); });
  const auto backwards = play_all(kTasks - 1);
  thread.join();
  EXPECT_EQ(in_order, other);
  EXPECT_EQ(in_order, backwards);
}

TEST(EmbeddedScene, HasPolicyAndTools) {
  const auto domain = domain_of(Kind::Retail);
  const auto world = domain.make();
  const Scene scene = world->reset(domain.task("train", 0), 0);
  EXPECT_THAT(scene.policy, HasSubstr("no digital item"));
  EXPECT_EQ(scene.tools.size(), 7U);
  EXPECT_EQ(
      scene.tools.at(4),
      "{\"type\": \"function\", \"function\": {\"name\": \"exchange_order\", \"description\": "
      "\"Exchanges an order for another item. Costs money.\", \"parameters\": {\"type\": "
      "\"object\", \"properties\": {\"id\": {\"type\": \"string\"}, \"item\": {\"type\": "
      "\"string\"}}, \"required\": [\"id\", \"item\"]}}}");
  const auto gold = domain.gold_calls(domain.task("train", 0));
  EXPECT_EQ(gold.at(0).name, "get_order");
}

}  // namespace
}  // namespace lockstep::rl

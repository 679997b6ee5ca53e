// What ends a rollout, or an episode before the agent has spoken, and who plays baselines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "lockstep/core/error.h"
#include "lockstep/rl/rollout.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "rl/run/record.h"
#include "rl/run/setup.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

// Says so many letters.
struct Writer : rl::UserSimulator {
  explicit Writer(size_t letters) : letters_(letters) {}
  Message next(const Scene&, std::span<const Message>, uint64_t) override {
    return {.role = rl::Role::User, .content = std::string(letters_, 'a')};
  }

 private:
  size_t letters_;
};

rl::Arenas arenas_with(size_t letters) {
  return {{"even", {std::make_shared<EvenDomain>("even"), [=] {
                      return std::make_unique<Writer>(letters);
                    }}}};
}

text::Tokenizer letters_tokenizer() {
  text::TrainerOptions options{.vocabulary = 264};
  options.added = {{"<|im_start|>"}, {"<|im_end|>"}, {"<tool_call>"}, {"</tool_call>"}};
  const std::vector<std::string_view> lines = {"so it is"};
  return text::train_tokenizer(lines, options);
}

std::vector<rl::Played> played_with(size_t letters, int64_t context,
                                    const std::function<void()>& check = {}) {
  const auto tokens = letters_tokenizer();
  models::Transformer net(
      models::TransformerOptions{.vocabulary = static_cast<int64_t>(tokens.size()),
                                 .layers = 1,
                                 .hidden = 16,
                                 .heads = 2,
                                 .max_length = 512});
  return rl::roll_out(
      net, tokens, rl::chat_text(), arenas_with(letters), {{{"even", "train", "0"}, 1}},
      {.limits = {.max_turns = 1, .max_new_tokens = 8, .context = context}, .check = check});
}

// As a later message that leaves no room: one of a model may be as long.
TEST(RolloutEnds, AUserWhoFillsTheContextEndsTheEpisode) {
  isolated([] {
    EXPECT_GT(played_with(10, 200).at(0).own_tokens(), 0);
    const auto full = played_with(300, 200).at(0);
    EXPECT_EQ(full.end, End::ContextFull);
    EXPECT_EQ(full.log.size(), 1U);
    EXPECT_TRUE(full.tokens.ids.empty());
    // The task alone is too long.
    EXPECT_THAT(message_of<ConfigError>([] { played_with(300, 5); }),
                HasSubstr("the context is 5"));
  });
}

TEST(RolloutEnds, ByItsCheck) {
  isolated([] {
    int calls = 0;
    const auto check = [&] {
      if (++calls == 3) throw std::runtime_error("the others have stopped");
    };
    EXPECT_EQ(message_of([&] { played_with(10, 200, check); }), "the others have stopped");
    EXPECT_EQ(calls, 3);
  });
}

// What a model says as a user depends on the episode: what one says of key 0 is no measure.
TEST(RolloutEnds, ALengthOfAModelsFirstMessageRefusesNoRun) {
  isolated([] {
    rl::Course course{.arenas = arenas_with(300), .text = rl::chat_text()};
    RunOptions o = options("run");
    o.order = {"even"};
    o.context = 200;
    const auto curriculum = rl::plan_curriculum(course, o);
    const auto refused = [&] {
      return message_of<ConfigError>([&] {
        rl::check_lengths(comm::Group(), course, curriculum, letters_tokenizer(), o, 512);
      });
    };
    EXPECT_THAT(refused(), HasSubstr("--context 200: the task even/train/0 begins with"));
    course.user_voice = std::make_shared<rl::Voice>();
    EXPECT_EQ(refused(), "nothing");
    o.context = 8;
    EXPECT_THAT(refused(), HasSubstr("--context 8: the task even/train/0 begins with"));
  });
}

// The others would play to their ends, which takes minutes, before they meet it.
TEST(RolloutEnds, AtOnceWhereOneRankFails) {
  for (const std::string backend : {"shm", "tcp"}) {
    spawn(3,
          [](World& world) {
            const rl::RolloutPlan plan{.episodes = std::vector<rl::Planned>(6), .lanes = 3};
            const auto play = [&](const auto& episodes) {
              const at::Tensor plays = at::zeros({1});
              if (world.rank() == 1) {
                for (const int other : {0, 2}) world.group().recv(plays, other).wait();
                throw std::runtime_error("no reward for task 7");
              }
              world.group().send(plays, 1).wait();
              while (world.rank() == 0 && !world.group().failure()) std::this_thread::yield();
              return std::vector<rl::Played>(episodes.size());
            };
            const auto text = message_of([&] { rl::run_rollout(plan, world.group(), play); });
            if (world.rank() == 1) {
              EXPECT_EQ(text, "no reward for task 7");
            } else {
              EXPECT_THAT(text, HasSubstr("[rollout] rank 1: no reward for task 7"));
            }
          },
          {.backend = backend});
  }
}

TEST(Baselines, AreDividedOverTheRanks) {
  const auto course_of_one = course();
  rl::RolloutPlan plan;
  for (int i = 0; i < 11; ++i)
    plan.episodes.push_back({{"even", "train", std::to_string(i % 10)}, static_cast<uint64_t>(i)});
  const auto lines = [](const rl::Planned& planned) {
    return std::vector<std::string>{std::string(planned.key % 3 + 1, 'a')};
  };
  for (const int ranks : {1, 2, 3}) {
    spawn(ranks, [&](World& world) {
      int begun = 0;
      on_world = [&] { ++begun; };
      EXPECT_EQ(rl::scripted(course_of_one, plan, {}, world.group(), lines), 4.0 / 11);
      EXPECT_EQ(begun, 11 / world.size() + (world.rank() < 11 % world.size() ? 1 : 0));
    });
  }
}

// No configuration can mend what an environment does, and a program's exit status says so.
TEST(Baselines, WhatOneRankThrowsIsThrownOnAll) {
  spawn(2, [](World& world) {
    const rl::RolloutPlan plan{.episodes = std::vector<rl::Planned>(4, {{"even", "train", "0"}})};
    const auto thrown_by = [&](const std::function<void()>& fail) {
      return [&, fail] {
        rl::scripted(course(), plan, {}, world.group(), [&](const rl::Planned&) {
          if (world.rank() == 1) fail();
          return std::vector<std::string>();
        });
      };
    };
    const auto failing = thrown_by([] { throw std::runtime_error("no lines"); });
    EXPECT_EQ(message_of<Error>(failing), "no lines");
    EXPECT_THROW(thrown_by([] { throw ConfigError("no such task"); })(), ConfigError);
    try {
      failing();
    } catch (const std::exception& error) {
      EXPECT_EQ(dynamic_cast<const ConfigError*>(&error), nullptr);
    }
    EXPECT_EQ(message_of<Error>(thrown_by([] { throw 42; })),
              "an exception that is not a std::exception");
  });
}

}  // namespace
}  // namespace lockstep::test

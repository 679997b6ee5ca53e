// What a warm-up leaves in its cache.
#include "lockstep/rl/warm_up.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/core/error.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

rl::WarmUpOptions of_steps(int64_t steps, const std::string& cache) {
  return {.steps = steps, .batch = 3, .lanes = 4, .corpus = 20, .cache = cache};
}

rl::WarmedUp warmed_up(World& world, const rl::WarmUpOptions& options) {
  return rl::warm_up(world, course().demonstrate, course().text, course().arenas, options);
}

TEST(WarmUp, ThatDivergesIsNotKept) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto options = of_steps(12, folder / "cache");
    options.learning_rate = 1e30;
    EXPECT_THAT(message_of<Error>([&] { warmed_up(world, options); }),
                testing::HasSubstr("the gradient's norm is"));
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "cache"));
}

class Talker : public rl::UserSimulator {
 public:
  Message next(const Scene&, std::span<const Message>, uint64_t) override {
    return {.content = "so"};
  }
};

TEST(WarmUp, LearnsAllLinesOfAScript) {
  spawn(1, [](World& world) {
    const rl::Arenas arenas{{"even", {std::make_shared<EvenDomain>("even"), [] {
                                        return std::make_unique<Talker>();
                                      }}}};
    const auto twelve_lines = [](int64_t) {
      return rl::Demonstration{.planned = {{"even", "train", "0"}, 0},
                               .lines = std::vector<std::string>(12, "a")};
    };
    auto text = course().text;
    int answers = 0;
    text.answer = [&](std::span<const Message>) {
      ++answers;
      return std::string("so");
    };
    auto options = of_steps(1, "");
    options.corpus = options.batch = 1;
    rl::warm_up(world, twelve_lines, text, arenas, options);
    EXPECT_EQ(answers, 24);  // for the tokenizer, and for the step
  });
}

TEST(WarmUp, RefusesDialoguesThatTheModelCannotRead) {
  spawn(2, [](World& world) {
    auto options = of_steps(12, "");
    options.model.max_length = 12;
    EXPECT_THAT(message_of<ConfigError>([&] { warmed_up(world, options); }),
                testing::ContainsRegex("the dialogue about (even|again)/train/[0-9] has [0-9]+ "
                                       "tokens, and the model 12 positions: give .* --context"));
  });
}

TEST(WarmUp, OfAnotherModelIsMadeAnew) {
  const Folder folder;
  spawn(1, [&](World& world) {
    auto options = of_steps(1, folder / "cache");
    EXPECT_FALSE(warmed_up(world, options).cached);
    EXPECT_TRUE(warmed_up(world, options).cached);
    options.model.tied = false;
    EXPECT_FALSE(warmed_up(world, options).cached);
  });
}

// It began with the parameters that were in the cache, and what could not be read stayed there.
TEST(WarmUp, WhoseTokenizerCannotBeReadIsMadeAsTheFirst) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto options = of_steps(2, folder / "cache");
    const auto first = warmed_up(world, options);
    if (world.is_main()) {
      for (const auto& kept : std::filesystem::directory_iterator(options.cache)) {
        std::filesystem::resize_file(kept.path() / "tokenizer.json", 100);
      }
    }
    const auto again = warmed_up(world, options);
    EXPECT_FALSE(again.cached);
    EXPECT_EQ(again.loss, first.loss);
    const auto expected = first.net->parameters(), made = again.net->parameters();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(made[i].equal(expected[i]));
    const auto third = warmed_up(world, options);
    EXPECT_TRUE(third.cached);
    const auto kept = third.net->parameters();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(kept[i].equal(expected[i]));
  });
  const std::filesystem::directory_iterator all(folder / "cache");
  EXPECT_EQ(std::distance(begin(all), end(all)), 1);
}

}  // namespace
}  // namespace lockstep::test

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

}  // namespace
}  // namespace lockstep::test

// What a run of several domains prints while it plays.
#include "rl/run/screen.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <thread>

#include "support/spawn.h"

namespace lockstep::test {
namespace {

// All that was printed.
class Printed {
 public:
  ~Printed() { std::fclose(file_); }
  std::FILE* file() const { return file_; }
  std::string text() const {
    std::string out(static_cast<size_t>(std::ftell(file_)), '\0');
    std::rewind(file_);
    out.resize(std::fread(out.data(), 1, out.size(), file_));
    return out;
  }

 private:
  std::FILE* file_ = std::tmpfile();
};

TEST(Screen, WritesOverALineOfATerminal) {
  const Printed printed;
  rl::Screen screen(true, printed.file(), {.width = 5, .rewrites = true});
  while (!screen.is_due()) std::this_thread::yield();
  screen.progress("1 of 2");
  screen.progress("not due");
  screen.print("over");
  screen.print("stays");
  EXPECT_EQ(printed.text(), "1 of\x1b[K\r\x1b[Kover\nstays\n");
}

TEST(Screen, HasNoLineForEachMessageElsewhere) {
  const Printed printed;
  rl::Screen screen(true, printed.file(), {.width = 0});
  screen.progress("1 of 2");
  screen.print("over");
  EXPECT_EQ(printed.text(), "over\n");
  rl::Screen off(false, printed.file(), {.width = 80, .rewrites = true});
  off.print("nothing");
  EXPECT_FALSE(off.is_due());
}

TEST(RolloutLine, CountsWhatThisRankPlaysOverItsLanes) {
  spawn(2, [](World& world) {
    const Printed printed;
    rl::Screen screen(true, printed.file(), {.width = 200, .rewrites = true});
    const rl::RolloutPlan plan{
        .episodes = std::vector<rl::Planned>(10), .group_size = 2, .lanes = 4};
    // Lanes 0 and 1 have three groups, lanes 2 and 3 two.
    rl::RolloutLine line(screen, "stage", plan, world.group());
    line.add(std::vector<rl::Played>(2));
    while (!screen.is_due()) std::this_thread::yield();
    line.show({.episodes = 2, .over = 1, .tokens = 0});
    EXPECT_EQ(printed.text(), std::string("stage: rank 0 has played 3 of ") +
                                  (world.rank() == 0 ? "6" : "4") +
                                  " episodes, 0 tokens/s\x1b[K\r");
  });
}

}  // namespace
}  // namespace lockstep::test

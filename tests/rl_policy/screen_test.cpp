// What a run of several domains prints while it plays.
#include "rl/run/screen.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

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

using std::chrono::milliseconds;

// The time, which goes on as a test says.
struct Time {
  rl::Screen::Clock::time_point now = {};
  std::function<rl::Screen::Clock::time_point()> clock() {
    return [this] { return now; };
  }
};

TEST(Screen, WritesOverALineOfATerminal) {
  const Printed printed;
  Time time;
  rl::Screen screen(true, printed.file(), {.width = 5, .rewrites = true}, time.clock());
  time.now += milliseconds(199);
  screen.progress("not due");
  time.now += milliseconds(1);
  screen.progress("1 of 2");
  time.now += milliseconds(199);
  screen.progress("nor this");
  screen.print("over");
  screen.print("stays");
  EXPECT_EQ(printed.text(), "1 of\x1b[K\r\x1b[Kover\nstays\n");
}

TEST(Screen, HasALineAMinuteElsewhere) {
  const Printed printed;
  Time time;
  rl::Screen screen(true, printed.file(), {.width = 0}, time.clock());
  time.now += milliseconds(59'999);
  screen.progress("not due");
  time.now += milliseconds(1);
  screen.progress("1 of 2");
  screen.progress("nor this");
  screen.print("over");
  EXPECT_EQ(printed.text(), "1 of 2\nover\n");
  rl::Screen off(false, printed.file(), {.width = 80, .rewrites = true});
  off.print("nothing");
  EXPECT_FALSE(off.is_due());
}

TEST(RolloutLine, CountsWhatThisRankPlaysOverItsLanes) {
  spawn(2, [](World& world) {
    const Printed printed;
    Time time;
    rl::Screen screen(true, printed.file(), {.width = 200, .rewrites = true}, time.clock());
    const rl::RolloutPlan plan{
        .episodes = std::vector<rl::Planned>(10), .group_size = 2, .lanes = 4};
    // Lanes 0 and 1 have three groups, lanes 2 and 3 two.
    rl::RolloutLine line(screen, "stage", plan, world.group());
    line.add(std::vector<rl::Played>(2));
    time.now += milliseconds(200);
    line.show({.episodes = 2, .over = 1, .tokens = 0});
    EXPECT_EQ(printed.text(), std::string("stage: rank 0 has played 3 of ") +
                                  (world.rank() == 0 ? "6" : "4") +
                                  " episodes, 0 tokens/s\x1b[K\r");
  });
}

}  // namespace
}  // namespace lockstep::test

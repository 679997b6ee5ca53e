// Random runs of a Trainer, each undisturbed and on several disturbed courses, which end alike.
//
// random_runs [--seed N] [--count N | --minutes M] [--courses N] [--shrink N] [--show yes]
//             [--run TEXT --course TEXT]
#include <fmt/format.h>

#include <chrono>
#include <cstdio>

#include "random/common/options.h"
#include "random/runs/compare.h"
#include "support/folder.h"

namespace lockstep::test::runs {
namespace {

struct Options {
  uint64_t seed = 1;
  int count = 20;
  double minutes = 0;
  int courses = 3;  // of each run
  int shrink = 60;
  std::string run, course, show;
};

Options options_from(int count, char** words) {
  Options options;
  read_options(count, words,
               {{"--seed", &options.seed},
                {"--count", &options.count},
                {"--minutes", &options.minutes},
                {"--courses", &options.courses},
                {"--shrink", &options.shrink},
                {"--run", &options.run},
                {"--course", &options.course},
                {"--show", &options.show}});
  return options;
}

struct Tally {
  int runs = 0, courses = 0, interruptions = 0, happened = 0, refused = 0, failed = 0;
};

// The undisturbed run, and what differs on the course; empty: nothing, or the run itself fails.
std::string difference_on(const Settings& run, const Course& course) {
  const Folder calm, rough;
  const Left expected = follow(run, {{}}, calm.path());
  if (!expected.fault.empty()) return {};
  return difference(run, course, expected, follow(run, course, rough.path()), rough.path());
}

void report(uint64_t seed, Settings run, Course course, std::string what, int most) {
  fmt::print("FAILED seed {}\n  --run '{}'\n  --course '{}'\n  {}\n", seed, run.text(),
             text_of(course), what);
  std::fflush(stdout);
  for (bool found = most > 0; found;) {
    found = false;
    for (const auto& [simpler, shorter] : smaller(run, course)) {
      if (most-- <= 0) break;
      const auto still = difference_on(simpler, shorter);
      if (still.empty()) continue;
      run = simpler, course = shorter, what = still, found = true;
      break;
    }
  }
  fmt::print("  smallest:\n  --run '{}' --course '{}'\n  {}\n", run.text(), text_of(course), what);
  std::fflush(stdout);
}

void try_seed(uint64_t seed, const Options& options, Tally& tally) {
  Dice dice(mixed(seed, 1));
  const Settings run = drawn_run(dice);
  const Folder calm;
  const Left expected = follow(run, {{}}, calm.path());
  ++tally.runs;
  if (options.show == "yes") fmt::print("seed {}: {}\n", seed, run.text());
  if (!expected.fault.empty()) {
    ++tally.refused;
    fmt::print("seed {} refused: {}\n  --run '{}'\n", seed, expected.fault, run.text());
    return;
  }
  for (int i = 0; i < options.courses; ++i) {
    const Course course = drawn_course(dice, run, expected.places());
    const Folder rough;
    const Left left = follow(run, course, rough.path());
    const auto what = difference(run, course, expected, left, rough.path());
    ++tally.courses;
    tally.interruptions += static_cast<int>(course.size()) - 1;
    tally.happened += left.happened;
    if (options.show == "yes") fmt::print("  {} of '{}'\n", left.happened, text_of(course));
    if (what.empty()) continue;
    ++tally.failed;
    report(seed, run, course, what, options.shrink);
    return;
  }
}

int run_all(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  Tally tally;
  const auto more = [&] {
    return options.minutes > 0 ? seconds() < options.minutes * 60 : tally.runs < options.count;
  };
  for (uint64_t seed = options.seed; more(); ++seed) try_seed(seed, options, tally);
  fmt::print(
      "seeds from {}: {} runs on {} courses, {} of {} interruptions happened, {} runs refused, {} "
      "failed, {:.0f} s\n",
      options.seed, tally.runs, tally.courses, tally.happened, tally.interruptions, tally.refused,
      tally.failed, seconds());
  return tally.failed > 0 || tally.happened == 0 ? 1 : 0;
}

int run_one(const Options& options) {
  const auto what = difference_on(Settings::parse(options.run), course_from(options.course));
  fmt::print("{}\n", what.empty() ? "good" : what);
  return what.empty() ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::test::runs

int main(int count, char** words) {
  using namespace lockstep::test::runs;
  setvbuf(stdout, nullptr, _IOLBF, 0);  // a rank that is forked has nothing of it to print again
  try {
    const auto options = options_from(count, words);
    return options.course.empty() ? run_all(options) : run_one(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "random_runs: {}\n", error.what());
    return 2;
  }
}

// Runs whose disk takes no more: as a full one does, a limit on the size of files lets a part of
// what is written through.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <sstream>
#include <string>

#include "lockstep/checkpoint/error.h"
#include "lockstep/core/error.h"
#include "rl_policy/even_course.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Files of this process have at most so many bytes; what exceeds them is an error and no signal.
void limit_files(rlim_t bytes) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = std::min(bytes, limit.rlim_max);
  setrlimit(RLIMIT_FSIZE, &limit);
}

// How many worlds have begun since there were trajectories; in an evaluation before the first
// stage, each of 6 on one rank, then in 2 iterations of 15, and in 2 evaluations.
int64_t worlds_since(const std::string& trajectories) {
  static int64_t count = 0;
  if (count > 0 || (fs::exists(trajectories) && fs::file_size(trajectories) > 0)) ++count;
  return count;
}

std::string without(const std::string& text, const std::vector<std::string>& parts) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool is_out = std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
      return line.find(part) != std::string::npos;
    });
    if (!is_out) out += line + "\n";
  }
  return out;
}

TEST(FullDisk, CostsTrajectoriesAndNothingElse) {
  const Folder folder;
  auto o = options(folder / "undisturbed");
  o.log_all = true;
  o.save_every = 100;  // saves after stages alone
  Left expected = left_by_ranks(1, o);
  expected.trajectories =
      without(expected.trajectories,
              {R"("row":0,"domain":"again")", R"("phase":"learn","stage":1,"iteration":0)"});

  o.output_dir = folder / "run";
  o.resume = true;
  testing::internal::CaptureStderr();
  const auto statuses = spawn(1,
                              [&](World& world) {
                                const std::string trajectories =
                                    o.output_dir + "/trajectories.jsonl";
                                on_world = [&] {
                                  const auto worlds = worlds_since(trajectories);
                                  if (worlds == 1) limit_files(fs::file_size(trajectories) + 20);
                                  if (worlds == 30)
                                    limit_files(RLIM_INFINITY);      // in the second iteration
                                  if (worlds == 52) raise(SIGKILL);  // in the second stage
                                };
                                rl::run_continual(world, course(), o);
                              },
                              {.doomed = {0}});
  const std::string said = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(WIFSIGNALED(statuses[0]) && WTERMSIG(statuses[0]) == SIGKILL) << said;
  const std::string warning =
      "trajectories.jsonl takes no more lines (File too large); training continues";
  EXPECT_THAT(said, HasSubstr(warning));
  EXPECT_EQ(said.find(warning), said.rfind(warning)) << said;
  EXPECT_EQ(left_by_ranks(2, o), expected);
}

TEST(FullDisk, LeavesOutCheckpointsAndMakesTheRunEndWithAnError) {
  const Folder folder;
  const Left undisturbed = left_by_ranks(1, options(folder / "undisturbed"));
  auto o = options(folder / "run");
  o.resume = o.export_hf = true;
  testing::internal::CaptureStderr();
  spawn(2, [&](World& world) {
    const std::string trajectories = o.output_dir + "/trajectories.jsonl";
    on_world = [&] {
      if (world.rank() == 1 && worlds_since(trajectories) == 9) limit_files(100);
    };
    EXPECT_THAT(message_of<Error>([&] { rl::run_continual(world, course(), o); }),
                testing::AllOf(HasSubstr("cannot be written: File too large"),
                               HasSubstr("the run ended without this checkpoint")));
  });
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("File too large; training continues without this checkpoint"));
  EXPECT_EQ(left_by(o.output_dir), undisturbed);
  EXPECT_EQ(left_by_ranks(2, o), undisturbed);  // from the last whole checkpoint on
  for (const char* stage : {"stage_1_even", "stage_2_again"}) {
    EXPECT_TRUE(fs::exists(o.output_dir + "/grpo_checkpoints/" + stage + "/latest"));
    EXPECT_TRUE(fs::exists(o.output_dir + "/checkpoints/" + stage + "/latest"));
  }
}

TEST(FullDisk, EndsAllRanksWithTheCheckpointThatItDoesNotTakeWhereThatIsAskedFor) {
  const Folder folder;
  const Left undisturbed = left_by_ranks(1, options(folder / "undisturbed"));
  auto o = options(folder / "run");
  o.resume = o.strict_save = true;
  spawn(2, [&](World& world) {
    const std::string trajectories = o.output_dir + "/trajectories.jsonl";
    on_world = [&] {
      if (world.rank() == 1 && worlds_since(trajectories) == 9) limit_files(100);
    };
    EXPECT_THAT(
        message_of<CheckpointError>([&] { rl::run_continual(world, course(), o); }),
        testing::AllOf(HasSubstr("/checkpoints/"), HasSubstr("cannot be written: File too large")));
  });
  EXPECT_EQ(left_by_ranks(2, o), undisturbed);
}

TEST(FullDisk, EndsWithAnErrorWhenResultsAreNotWrittenAtTheEnd) {
  const Folder folder;
  auto o = options(folder / "run");
  const Left undisturbed = left_by_ranks(1, options(folder / "undisturbed"));
  fs::create_directories(folder / "run/results.json");  // so no file can take this name
  fs::create_directories(folder / "run/curriculum.json");
  testing::internal::CaptureStderr();
  spawn(2, [&](World& world) {
    EXPECT_THAT(message_of<Error>([&] { rl::run_continual(world, course(), o); }),
                HasSubstr("/run/results.json cannot be written: Is a directory; a checkpoint has "
                          "all of the run: --resume writes it"));
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("/run/curriculum.json cannot be written"));
  EXPECT_THAT(said, HasSubstr("Is a directory; the run continues"));
  fs::remove(folder / "run/results.json");
  fs::remove(folder / "run/curriculum.json");
  o.resume = true;
  EXPECT_EQ(left_by_ranks(1, o), undisturbed);
  EXPECT_THAT(contents(folder / "run/curriculum.json"), HasSubstr("stage_2_again"));
}

}  // namespace
}  // namespace lockstep::test

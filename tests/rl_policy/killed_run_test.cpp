// Runs that are killed somewhere go on with the same bits.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>

#include "rl_policy/even_course.h"

namespace {

// How many more files may be brought to the disk before this process is killed.
std::atomic<int> files_left = -1;

// How many more log-probabilities may be computed, in the warm-up and in updates.
std::atomic<int> log_probs_left = -1;

std::unique_ptr<at::ObserverContext> on_function(const at::RecordFunction& function) {
  if (log_probs_left >= 0 && std::strcmp(function.name(), "aten::log_softmax") == 0 &&
      log_probs_left-- == 0) {
    raise(SIGKILL);
  }
  return nullptr;
}

}  // namespace

// In place of the C library's, also for the library that is tested.
extern "C" int fsync(int fd) {
  if (files_left >= 0 && files_left-- == 0) raise(SIGKILL);
  return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace lockstep::test {
namespace {

// Which rank of two dies, at what of it, and after how many of these.
struct Death {
  const char* name;
  int rank;
  std::atomic<int>* counter;
  int count;
};

// Groups without a difference are not dropped: every iteration updates.
RunOptions updating(const std::string& folder) {
  RunOptions o = options(folder);
  o.drop_equal_groups = false;
  return o;
}

class KilledRun : public testing::TestWithParam<Death> {
 public:
  static void SetUpTestSuite() {
    const Folder folder;
    undisturbed_ = left_by_ranks(1, updating(folder / "run"));
  }

 protected:
  static inline Left undisturbed_;
};

TEST_P(KilledRun, GoesOnWithTheSameBits) {
  const Folder folder;
  auto o = updating(folder / "killed");
  o.resume = true;  // goes on with what is there, if anything is
  const Death& death = GetParam();
  const auto statuses = spawn(2,
                              [&](World& world) {
                                at::addGlobalCallback(at::RecordFunctionCallback(on_function));
                                if (world.rank() == death.rank) *death.counter = death.count;
                                rl::run_continual(world, course(), o);
                              },
                              {.doomed = {0, 1}});
  const int status = statuses.at(static_cast<size_t>(death.rank));
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  EXPECT_EQ(left_by_ranks(3, o), undisturbed_);
}

// A warm-up plays 636 dialogues and computes 24 log-probabilities; baselines play 6 episodes
// of each rank, after rank 0 has begun the 14 tasks to see how long they are.
INSTANTIATE_TEST_SUITE_P(Stages, KilledRun,
                         testing::Values(Death{"WarmUp", 1, &worlds_left, 620},
                                         Death{"Rollout", 0, &worlds_left, 668},
                                         Death{"Update", 0, &log_probs_left, 24},
                                         Death{"LaterUpdate", 1, &log_probs_left, 25},
                                         Death{"Evaluation", 1, &worlds_left, 673},
                                         Death{"Save", 1, &files_left, 1},
                                         Death{"LaterSave", 0, &files_left, 20}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lockstep::test

// Signals that reach the launcher when a rank has failed already: there is no restart then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "launch/job.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class LateSignal : public ::testing::TestWithParam<int> {
 protected:
  // Rank 1 has failed, which rank 0 has seen; rank 0 ends when it has read a line.
  static std::vector<std::string> failing(const std::string& restarts) {
    return {"run",
            "--nproc-per-node=2",
            "--grace=60",
            "--max-restarts=" + restarts,
            "sh",
            "-c",
            "echo try $TORCHELASTIC_RESTART_COUNT; test $RANK = 1 && exit 3; trap '' TERM HUP; "
            "\"$SELF\" rank watch; echo known; read line"};
  }
  const Settings settings_{
      .environment = {{"SELF", std::filesystem::read_symlink("/proc/self/exe")}}};
};

TEST_P(LateSignal, EndsTheJobInsteadOfARestart) {
  Job job(failing("2"), settings_);
  ASSERT_TRUE(job.await("known"));
  kill(job.pid(), GetParam());
  if (GetParam() != SIGINT) {
    ASSERT_TRUE(job.await_error("no rank is started again"));
    job.write_input("\n");
  }
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 128 + GetParam());
  EXPECT_THAT(result.out, Not(HasSubstr("try 1")));
  EXPECT_THAT(result.err, HasSubstr("rank 1 failed first: it exited with status 3"));
}

INSTANTIATE_TEST_SUITE_P(All, LateSignal, ::testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& one) { return std::string(sigabbrev_np(one.param)); });

TEST_F(LateSignal, WithoutRestartsTheFailureIsTheStatus) {
  Job job(failing("0"), settings_);
  ASSERT_TRUE(job.await("known"));
  kill(job.pid(), SIGTERM);
  job.write_input("\n");
  EXPECT_EQ(job.wait().exit_code, 3);
}

// Every rank has exited with 0, but not what one of them has started.
TEST(LateSignalToALauncherThatWaits, IsTheStatus) {
  Job job({"run", "--nproc-per-node=2", "--grace=60", "sh", "-c",
           "test $RANK = 0 || exit 0; (trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; "
           "done) & exit 0"});
  ASSERT_TRUE(job.await("ready"));
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGTERM);
}

}  // namespace
}  // namespace lockstep::launch::testing

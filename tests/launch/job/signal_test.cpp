// Signals to the launcher.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "launch/job.h"
#include "launch/process/signals.h"
#include "lockstep/core/preemption.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;

// Two ranks that have signed in, and ignore TERM and INT where `trap` says so.
std::vector<std::string> sleepers(const std::string& grace, const std::string& trap = ":") {
  return {"run",
          "--nproc-per-node=2",
          "--grace=" + grace,
          "sh",
          "-c",
          "exec 9>$FIFO; " + trap + "; echo ready; exec sleep 1000"};
}

class SignalTest : public ::testing::Test {
 protected:
  Presence presence_;
  Settings settings_{.environment = {{"FIFO", presence_.path()}}};

  bool nobody_left() { return presence_.everybody_left(std::chrono::milliseconds(0)); }
};

class StoppingSignal : public SignalTest, public ::testing::WithParamInterface<int> {};

TEST_P(StoppingSignal, EndsTheJob) {
  Job job(sleepers("60"), settings_);
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), GetParam());
  EXPECT_EQ(job.wait().exit_code, 128 + GetParam());
  EXPECT_TRUE(nobody_left());
}

INSTANTIATE_TEST_SUITE_P(All, StoppingSignal, ::testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& one) { return std::string(sigabbrev_np(one.param)); });

TEST_F(SignalTest, TheSameSignalReachesTheRanks) {
  Job job(
      script_args(2, "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGTERM);
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.out, HasSubstr("[rank 0] saved\n"));
  EXPECT_THAT(result.out, HasSubstr("[rank 1] saved\n"));
  EXPECT_THAT(result.err, HasSubstr("stopped by SIGTERM"));
}

TEST_F(SignalTest, RanksThatDoNotStopAreKilledAfterTheGrace) {
  Job job(sleepers("0.2", "trap '' TERM"), settings_);
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGTERM);
  EXPECT_TRUE(nobody_left());
}

TEST_F(SignalTest, ASecondInterruptKillsAtOnce) {
  Job job(
      {"run", "--nproc-per-node=2", "--grace=3600", "sh", "-c",
       "exec 9>$FIFO; trap 'sleep 0.6; echo asked' INT; echo ready; while :; do sleep 0.01; done"},
      settings_);
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGINT);
  ASSERT_TRUE(job.await("asked", 2));  // more than 0.2 s later
  kill(job.pid(), SIGINT);
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_THAT(result.err, HasSubstr("killed at Ctrl-C, before the time to stop was over"));
  EXPECT_TRUE(nobody_left());
}

// The second comes when the first has been read, which is acted upon for longer than the time
// within which two are one.
TEST(OnePress, MayArriveTwice) {
  Signals signals;
  raise(SIGINT);
  EXPECT_EQ(signals.next(), SIGINT);
  raise(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(signals.next(), std::nullopt);
  raise(SIGTERM);
  EXPECT_EQ(signals.next(), SIGTERM);
}

// As when the terminal has sent it to the launcher and to timeout(1), which passes it on. Again
// where a busy machine let time pass between the two.
TEST_F(SignalTest, AnInterruptThatAWrapperPassesOnIsTheSamePress) {
  using Clock = std::chrono::steady_clock;
  for (auto took = Clock::duration::max(); took > std::chrono::milliseconds(20);) {
    Job job(script_args(2,
                        "trap 'sleep 0.6; echo saved; exit 0' INT; echo ready; "
                        "while :; do sleep 0.01; done"));
    ASSERT_TRUE(job.await("ready", 2));
    const auto start = Clock::now();
    for (int i = 0; i < 2; ++i) kill(job.pid(), SIGINT);
    took = Clock::now() - start;
    const Result result = job.wait();
    EXPECT_EQ(result.exit_code, 128 + SIGINT);
    if (took > std::chrono::milliseconds(20)) continue;
    EXPECT_THAT(result.out, HasSubstr("[rank 0] saved"));
    EXPECT_THAT(result.out, HasSubstr("[rank 1] saved"));
  }
}

TEST_F(SignalTest, WorkersDieWithAKilledLauncher) {
  Job job({"run", "--nproc-per-node=4", "sh", "-c",
           "exec 9>$FIFO; trap '' TERM INT HUP PIPE; echo ready; while :; do :; done"},
          settings_);
  ASSERT_TRUE(job.await("ready", 4));
  kill(job.pid(), SIGKILL);
  EXPECT_TRUE(presence_.everybody_left());
  EXPECT_EQ(job.wait().exit_code, 128 + SIGKILL);
}

TEST_F(SignalTest, GrandchildrenDieWithAKilledLauncherToo) {
  // In sessions of their own, one of them an orphan; each ignores what can be ignored.
  Job job({"run", "--nproc-per-node=2", "sh", "-c",
           "exec 9>$FIFO; trap '' TERM INT HUP; setsid sh -c 'sleep 1000 & sleep 1000' & "
           "(setsid sleep 1000 &); echo ready; wait"},
          settings_);
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGKILL);
  EXPECT_TRUE(presence_.everybody_left());
  EXPECT_EQ(job.wait().exit_code, 128 + SIGKILL);
}

TEST_F(SignalTest, SoDoThoseOfAJobThatARankHasStarted) {
  Job job({"run", LOCKSTEP_BINARY_DIR "/bin/lockstep", "run", "sh", "-c",
           "exec 9>$FIFO; setsid sleep 1000 & echo ready; wait"},
          settings_);
  ASSERT_TRUE(job.await("ready"));
  kill(job.pid(), SIGKILL);
  EXPECT_TRUE(presence_.everybody_left());
  EXPECT_EQ(job.wait().exit_code, 128 + SIGKILL);
}

// Else the outer job's reaper might end one beside its launcher, and leave the inner ranks'
// children.
TEST_F(SignalTest, TheReaperOfAnInnerJobHidesTheOuterMarkBeforeRanksStart) {
  EXPECT_THAT(Job(rank_args("reapers")).wait().out, HasSubstr("[rank 0] 0 of 50 were marked\n"));
}

TEST_F(SignalTest, AKilledLauncherEndsNoOtherJob) {
  Presence other;
  Job bystander(sleepers("60"), {.environment = {{"FIFO", other.path()}}});
  ASSERT_TRUE(bystander.await("ready", 2));
  Job job(sleepers("60"), settings_);
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGKILL);
  EXPECT_TRUE(presence_.everybody_left());
  job.wait();
  EXPECT_FALSE(other.everybody_left(std::chrono::milliseconds(200)));
}

TEST_F(SignalTest, UserSignalsAreForwardedAndEndNothing) {
  Job job(
      script_args(2, "trap 'echo usr1; exit 0' USR1; echo ready; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGUSR1);
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(lines_of(result.out).size(), 4u);
}

TEST_F(SignalTest, AStoppedRankGoesOnToSeeTheSignalAndNoOtherIsToldTo) {
  Job job(script_args(2, R"(trap 'echo goes on' CONT; trap 'told=1' TERM
      if test $RANK = 0; then
        echo $$ > $FIFO.pid; kill -STOP $$
      else
        until grep -q 'T (stopped)' /proc/$(cat $FIFO.pid)/status; do sleep 0.01; done 2>/dev/null
        rm $FIFO.pid; echo ready
      fi
      until test "$told"; do sleep 0.01; done
      for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.01; done
      echo saved)"),
          settings_);
  ASSERT_TRUE(job.await("ready", 1));
  kill(job.pid(), SIGTERM);
  const Result result = job.wait();
  EXPECT_THAT(result.out, HasSubstr("[rank 0] saved\n"));
  EXPECT_THAT(result.out, HasSubstr("[rank 1] saved\n"));
  EXPECT_THAT(result.out, HasSubstr("[rank 0] goes on\n"));
  EXPECT_THAT(result.out, Not(HasSubstr("[rank 1] goes on\n")));
}

TEST_F(SignalTest, APreemptionNoticeReachesProgramsThatPollForIt) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    Job job({"run", "--nproc-per-node=2", self, "rank", "preempted"});
    ASSERT_TRUE(job.await("ready", 2));
    kill(job.pid(), signal);
    const Result result = job.wait();
    EXPECT_EQ(result.exit_code, signal == SIGUSR1 ? 0 : 128 + SIGTERM);
    EXPECT_THAT(result.out, HasSubstr("[rank 0] saved on"));
    EXPECT_THAT(result.out, HasSubstr("[rank 1] saved on"));
  }
}

TEST_F(SignalTest, RanksThatAskForARequeueAreNoFailureAndNotStartedAgain) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    Job job({"run", "--nproc-per-node=2", "--max-restarts=1", self, "rank", "requeued"});
    ASSERT_TRUE(job.await("ready", 2));
    kill(job.pid(), signal);
    const Result result = job.wait();
    EXPECT_EQ(result.exit_code, kRequeueStatus);
    EXPECT_THAT(result.err, Not(HasSubstr("failed")));
    EXPECT_EQ(lines_of(result.out).size(), 2u);
  }
}

// One that does not save in time, or fails meanwhile, is none.
TEST_F(SignalTest, ARequeueIsAskedForByAllRanks) {
  for (const char* other : {"exit 3", "kill -KILL $$"}) {
    Job job(script_args(2, fmt::format("trap 'test $RANK = 1 && exit 75; {}' USR1; echo ready; "
                                       "while :; do sleep 0.01; done",
                                       other)));
    ASSERT_TRUE(job.await("ready", 2));
    kill(job.pid(), SIGUSR1);
    const Result result = job.wait();
    EXPECT_EQ(result.exit_code, other[0] == 'e' ? 3 : 128 + SIGKILL);
    EXPECT_THAT(result.err, HasSubstr("rank 0 failed first"));
  }
}

TEST_F(SignalTest, ARequeueIsAskedForByTheRanksOfAllHosts) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    const TwoHosts hosts;
    const std::vector<std::string> rank = {
        "sh", "-c",
        signal == SIGUSR1 ? "echo here; test $GROUP_RANK = 0 && exit 75; trap 'exit 9' USR1; "
                            "echo ready; while :; do sleep 0.01; done"
                          : "trap 'exit 75' TERM; echo here; echo ready; "
                            "while :; do sleep 0.01; done"};
    Job first(hosts.args(0, rank), TwoHosts::with_token());
    Job second(hosts.args(1, rank), TwoHosts::with_token());
    ASSERT_TRUE(first.await("here", 2));
    ASSERT_TRUE(second.await("ready", 2));
    kill(second.pid(), signal);
    const int expected = signal == SIGUSR1 ? 9 : kRequeueStatus;
    EXPECT_EQ(first.wait().exit_code, expected) << first.err();
    EXPECT_EQ(second.wait().exit_code, expected) << second.err();
  }
}

TEST_F(SignalTest, ASignalThatWasIgnoredStaysIgnored) {
  // nohup lockstep run ...
  settings_.ignored_signals = {SIGHUP};
  Job job(script_args(2, "echo ready; read x; echo done"), settings_);
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGHUP);
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("[rank 0] done"));
}

TEST_F(SignalTest, ASuspendedLauncherSuspendsItsRanks) {
  Job job(script_args(
      2, "echo pid=$$; read x; test $RANK = 1 || exit 0; while :; do sleep 0.01; done"));
  ASSERT_TRUE(job.await("pid=", 2));
  kill(job.pid(), SIGTSTP);
  int status = 0;
  ASSERT_EQ(waitpid(job.pid(), &status, WUNTRACED), job.pid());
  EXPECT_TRUE(WIFSTOPPED(status));
  kill(job.pid(), SIGTERM);
  kill(job.pid(), SIGCONT);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGTERM);
}

// Whether the process has blocked the signal, as a launcher does that reads it; as does whoever
// starts a program, until it becomes that.
bool listens(pid_t pid, int signal) {
  const std::string process = "/proc/" + std::to_string(pid);
  std::error_code none;
  if (std::filesystem::read_symlink(process + "/exe", none).filename() != "lockstep") return false;
  std::ifstream status(process + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigBlk:"))
      return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1)) & 1;
  }
  return false;
}

// Nobody else comes: it has no ranks yet.
TEST(WaitingLauncher, IsAskedWhereItsRanksAreAndGoesOn) {
  Job job({"run", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:0",
           "--rdzv-conf=is_host=1,join_timeout=600", "true"},
          {.environment = {{"LOCKSTEP_TOKEN", "0123456789abcdef"}}});
  while (!listens(job.pid(), SIGQUIT)) std::this_thread::yield();
  for (const int signal : {SIGUSR2, SIGQUIT}) {
    job.forget_errors();
    kill(job.pid(), signal);
    ASSERT_TRUE(job.await_error("no rank runs on this host at the moment"));
  }
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGTERM);
}

TEST_F(SignalTest, AnIgnoredSigchldDoesNotLoseTheExitStatus) {
  settings_.ignored_signals = {SIGCHLD};
  EXPECT_EQ(run_script(2, "test $RANK = 0 || exit 3", settings_).exit_code, 3);
}

}  // namespace
}  // namespace lockstep::launch::testing

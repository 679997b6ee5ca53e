// What ranks leave behind when they end well, what the launcher has not started itself, and ranks
// that do not come to an end.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <csignal>
#include <fstream>
#include <string>
#include <thread>

#include "launch/job.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Each rank ends when what it leaves behind has set its trap.
TEST(Leftover, ThatIsAskedEndsByItselfAndIsNamed) {
  const test::Folder folder;
  const Result result =
      Job({"run", "--nproc-per-node=2", "--grace=2", "sh", "-c",
           "test $RANK = 0 || exit 0; (trap 'echo asked; exit 0' TERM; : >$FOLDER/set; while :; do "
           "sleep 0.01; done) & until test -e $FOLDER/set; do sleep 0.01; done"},
          {.environment = {{"FOLDER", folder.path()}}})
          .wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("[rank 0] asked"));
  EXPECT_THAT(result.err,
              ContainsRegex("left processes running, which are asked to stop: .*sh \\(pid"));
}

TEST(Leftover, ThatDoesNotStopIsKilledAndNamed) {
  const test::Folder folder;
  const Result result = Job({"run", "--nproc-per-node=2", "--grace=0.1", "sh", "-c",
                             "setsid sh -c 'trap \"\" TERM; : >$FOLDER/$RANK; exec sleep 1000' & "
                             "until test -e $FOLDER/$RANK; do sleep 0.01; done"},
                            {.environment = {{"FOLDER", folder.path()}}})
                            .wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, ContainsRegex("killed, since they do not stop: (sh|sleep) \\(pid"));
}

// While the launcher gives it time, another host's rank fails, or its launcher is asked to end.
TEST(Leftover, IsStoppedAtOnceWhenTheJobIsOnAnotherHost) {
  const std::string script =
      "test $TORCHELASTIC_RESTART_COUNT = 0 || exit 0; if test $RANK = 1; then "
      "setsid sh -c 'while kill -0 $0; do sleep 0.01; done 2>/dev/null; : >$FOLDER/left; exec "
      "sleep 1000' "
      "$$ & "
      "exit 0; fi; until test -e $FOLDER/left; do sleep 0.01; done; echo left; $THEN";
  for (const bool fails : {true, false}) {
    const TwoHosts hosts;
    const test::Folder folder(test::Folder::On::Disk);
    const auto job = [&](int host) {
      auto args = hosts.args(host, {"--grace=30", "--max-restarts=1", "sh", "-c", script});
      args[2] = "--nproc-per-node=1";
      return Job(args, TwoHosts::with_token(
                           {.environment = {{"FOLDER", folder.path()},
                                            {"THEN", fails ? "exit 3" : "exec sleep 1000"}}}));
    };
    Job first = job(0), second = job(1);
    ASSERT_TRUE(first.await("left"));
    if (!fails) kill(first.pid(), SIGTERM);
    EXPECT_EQ(first.wait().exit_code, fails ? 0 : 128 + SIGTERM) << first.err();
    EXPECT_EQ(second.wait().exit_code, fails ? 0 : 128 + SIGTERM) << second.err();
    EXPECT_THAT(second.err(), Not(HasSubstr("left processes running")));
  }
}

TEST(Leftover, ThatTheLauncherHadBeforeIsLeftAlone) {
  for (const std::string script : {"true", "test $RANK = 0 || exit 3; exec sleep 1000"}) {
    Presence before;
    const Result result = run_script(2, script, {.child_holds = before.path()});
    EXPECT_EQ(result.exit_code, script == "true" ? 0 : 3);
    EXPECT_FALSE(before.everybody_left(std::chrono::milliseconds(0)));
    EXPECT_THAT(result.err, Not(HasSubstr("sleep (pid")));
  }
}

TEST(Leftover, ThatADebuggerHoldsIsNamedWithIt) {
  Job job({"run", "--grace=0.1", "sh", "-c", "echo $$; exec sleep 1000"});
  ASSERT_TRUE(job.await("\n"));
  const pid_t rank = std::stoi(job.out());
  ASSERT_EQ(ptrace(PTRACE_SEIZE, rank, nullptr, nullptr), 0);
  kill(job.pid(), SIGTERM);
  EXPECT_THAT(job.wait().err, HasSubstr(fmt::format("process {} (state Z) does not end after "
                                                    "SIGKILL: process {}, a debugger",
                                                    rank, getpid())));
  while (waitpid(rank, nullptr, __WALL) > 0) continue;
}

TEST(StoppedRank, IsNamedWhenTheOthersHaveEnded) {
  Job job(script_args(2, "test $RANK = 0 && exit 0; echo pid=$$.; kill -STOP $$; echo went on"));
  ASSERT_TRUE(job.await_error("rank 1 is stopped (state T, pid "));
  const size_t at = job.err().find("kill -CONT ");
  ASSERT_TRUE(job.await_error("\n", at));
  kill(std::stoi(job.err().substr(at + 11)), SIGCONT);
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("[rank 1] went on"));
}

// Between two stops the rank runs for longer than the launcher, as a rule, takes between two looks:
// it is continued until that was so.
TEST(StoppedRank, ThatIsStoppedAgainIsNamedAgain) {
  Job job(script_args(2, "test $RANK = 0 && exit 0; while :; do kill -STOP $$; sleep 1.5; done"));
  ASSERT_TRUE(job.await_error("rank 1 is stopped (state T, pid "));
  const size_t at = job.err().find("kill -CONT ");
  ASSERT_TRUE(job.await_error("\n", at));
  const pid_t rank = std::stoi(job.err().substr(at + 11));
  std::jthread user([rank](const std::stop_token& stop) {
    for (; !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::seconds(4)))
      kill(rank, SIGCONT);
  });
  EXPECT_TRUE(job.await_error("rank 1 is stopped (state T, pid ", at));
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGTERM);
}

// The children of a process, by name.
pid_t child_of(pid_t parent, const std::string& name) {
  std::ifstream children("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) +
                         "/children");
  for (pid_t child; children >> child;) {
    std::ifstream file("/proc/" + std::to_string(child) + "/comm");
    std::string text;
    if (std::getline(file, text) && text == name) return child;
  }
  return 0;
}

TEST(StoppedGuard, DoesNotKeepAFinishedLauncher) {
  for (const int signal : {SIGSTOP, SIGKILL}) {
    Job job(script_args(2, "echo ready; test $RANK = 0 && read x; exit 0"));
    ASSERT_TRUE(job.await("ready", 2));
    pid_t guard = 0;
    while ((guard = child_of(job.pid(), "lockstep-reaper")) == 0) std::this_thread::yield();
    kill(guard, signal);
    EXPECT_EQ(job.wait().exit_code, 0);
  }
}

}  // namespace
}  // namespace lockstep::launch::testing

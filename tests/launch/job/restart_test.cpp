// A job that is started again after a failure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "launch/job.h"
#include "launch/job/restarts.h"
#include "launch/rendezvous/coordinator/coordinator.h"

namespace lockstep::launch::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

Outcome failed(int rank, int wait_status, Restarts::Clock::duration ran) {
  Outcome outcome;
  outcome.ends.push_back({rank, 100, wait_status, ran, Push::None});
  outcome.cause = rank;
  return outcome;
}

constexpr int kExit3 = 3 << 8;

TEST(Restarts, AsManyAsAskedFor) {
  Restarts restarts(2);
  EXPECT_EQ(restarts.after(failed(0, kExit3, 60s)).pause, 0ms);
  EXPECT_EQ(restarts.after(failed(0, kExit3, 60s)).pause, 0ms);
  const auto last = restarts.after(failed(0, kExit3, 60s));
  EXPECT_EQ(last.pause, std::nullopt);
  EXPECT_THAT(last.text, HasSubstr("no restart is left of 2"));
}

TEST(Restarts, NoneUnlessAskedFor) {
  Restarts restarts(0);
  const auto decision = restarts.after(failed(0, kExit3, 60s));
  EXPECT_EQ(decision.pause, std::nullopt);
  EXPECT_EQ(decision.text, "");
}

TEST(Restarts, NoneAfterASignalToTheLauncher) {
  Restarts restarts(5);
  Outcome outcome;
  outcome.signal = SIGTERM;
  EXPECT_EQ(restarts.after(outcome).pause, std::nullopt);
}

TEST(Restarts, PausesDoubleBetweenQuickFailures) {
  Restarts restarts(100);
  std::vector<std::chrono::milliseconds> pauses;
  for (int i = 0; i < 10; ++i) pauses.push_back(*restarts.after(failed(i, kExit3, 10ms)).pause);
  EXPECT_THAT(pauses, ::testing::ElementsAre(0ms, 250ms, 500ms, 1000ms, 2000ms, 4000ms, 8000ms,
                                             16000ms, 30000ms, 30000ms));
  // One that has run for long starts again.
  EXPECT_EQ(restarts.after(failed(0, kExit3, 60s)).pause, 0ms);
  EXPECT_EQ(restarts.after(failed(1, kExit3, 10ms)).pause, 0ms);
}

TEST(Restarts, ACrashLoopEndsThem) {
  Restarts restarts(100);
  EXPECT_TRUE(restarts.after(failed(1, kExit3, 10ms)).pause);
  EXPECT_TRUE(restarts.after(failed(1, kExit3, 10ms)).pause);
  const auto decision = restarts.after(failed(1, kExit3, 10ms));
  EXPECT_EQ(decision.pause, std::nullopt);
  EXPECT_THAT(decision.text, HasSubstr("rank 1 failed in the same way 3 times in a row"));
  EXPECT_THAT(decision.text, HasSubstr("98 of 100 restarts unused"));
}

TEST(Restarts, DifferentFailuresAreNoLoop) {
  Restarts restarts(100);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(restarts.after(failed(i % 2, kExit3, 10ms)).pause);
}

// Ranks that fail alike do so in any order.
Outcome all_failed(int first, int second, int first_status, int second_status) {
  Outcome outcome = failed(first, first_status, 10ms);
  outcome.ends.push_back({second, 101, second_status, 11ms, Push::None});
  outcome.seen = {{.rank = 0}, {.rank = 1}};
  return outcome;
}

TEST(Restarts, RanksThatFailAlikeInAnyOrderAreACrashLoop) {
  Restarts restarts(100);
  EXPECT_TRUE(restarts.after(all_failed(0, 1, kExit3, kExit3)).pause);
  EXPECT_TRUE(restarts.after(all_failed(1, 0, kExit3, kExit3)).pause);
  const auto decision = restarts.after(all_failed(0, 1, kExit3, kExit3));
  EXPECT_EQ(decision.pause, std::nullopt);
  EXPECT_THAT(decision.text, HasSubstr("rank 0 failed in the same way 3 times in a row"));
}

TEST(Restarts, RanksThatFailBecauseOfAPeerAreNoLoop) {
  Restarts restarts(100);
  for (int i = 0; i < 10; ++i) {
    Outcome outcome = all_failed(0, 1, (1 + i % 2) << 8, kExit3);
    outcome.seen[1].log.failure = {900, flight::Blame::Peer, "rank 0 is gone"};
    EXPECT_TRUE(restarts.after(outcome).pause);
  }
}

TEST(Restarts, RanksThatFailAfterAKillFromOutsideAreNoLoop) {
  Restarts restarts(100);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(restarts.after(all_failed(0, 1, SIGKILL, kExit3)).pause);
  }
}

TEST(Restarts, KillsFromOutsideAreNoLoop) {
  Restarts restarts(100);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(restarts.after(failed(1, SIGKILL, 10ms)).pause);
}

// A rank that has reported its failure counts from then on, however slowly it ends.
TEST(Restarts, HowLongRanksTakeToEndAfterwardsDoesNotCount) {
  Outcome outcome = failed(1, kExit3, 20s);
  constexpr uint64_t kEnd = 100'000'000'000, kSaid = 81'000'000'000;
  outcome.ends.front().at_ns = kEnd;
  outcome.ends.push_back({0, 101, SIGKILL, 60s, Push::Killed});
  outcome.seen.push_back({.rank = 1});
  outcome.seen.front().log.failure = flight::Failure{.at_ns = kSaid, .blame = flight::Blame::Own};
  Restarts restarts(100);
  EXPECT_TRUE(restarts.after(outcome).pause);
  EXPECT_TRUE(restarts.after(outcome).pause);
  EXPECT_THAT(restarts.after(outcome).text, HasSubstr("failed in the same way 3 times in a row"));
}

// The same on several hosts.
TEST(Restarts, ACoordinatorSeesACrashLoopHoweverSlowlyRanksEnd) {
  const JobSpec job_spec{1, 1, 9};
  Coordinator coordinator(job_spec, {.survivors = Time{}}, "", Time{});
  coordinator.place({.launcher = 100, .host = "h", .job_spec = job_spec}, Time{});
  coordinator.receive(1, Ready{}, Time{});
  Time now{};
  for (uint32_t attempt = 1; attempt <= 3; ++attempt) {
    ASSERT_EQ(coordinator.phase(), Coordinator::Phase::Running);
    Failure failure{.rank = 1, .status = 3, .what = "rank 1 exited"};
    coordinator.receive(1, Failed{attempt, failure}, now + 100ms);
    failure.ago = 20s - 100ms;
    coordinator.receive(1, Ready{attempt, 0, failure}, now += 20s);
    if (coordinator.phase() != Coordinator::Phase::Gathering) continue;
    coordinator.tick(now += 60s);  // the pause is over
  }
  const auto broadcasts = coordinator.take_broadcasts();
  const auto* end = std::get_if<End>(&broadcasts.back());
  ASSERT_NE(end, nullptr);
  EXPECT_THAT(end->why, HasSubstr("rank 1 failed in the same way 3 times in a row"));
}

std::vector<std::string> restarting(const std::string& most, const std::string& script) {
  return {"run", "--nproc-per-node=2", "--max-restarts=" + most, "sh", "-c", script};
}

TEST(RestartedJob, AllRanksStartAgainAndSeeTheCount) {
  const Result result = Job(restarting("3",
                                       "echo $RANK $TORCHELASTIC_RESTART_COUNT "
                                       "$TORCHELASTIC_MAX_RESTARTS; "
                                       "test $RANK$TORCHELASTIC_RESTART_COUNT = 10 && exit 4; "
                                       "test $TORCHELASTIC_RESTART_COUNT = 1 || exec sleep 1000"))
                            .wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] 0 0 3", "[rank 1] 1 0 3",
                                                         "[rank 0] 0 1 3", "[rank 1] 1 1 3"));
  EXPECT_THAT(result.err, HasSubstr("rank 1 failed first: it exited with status 4"));
  EXPECT_THAT(result.err, HasSubstr("[lockstep] restart 1 of 3, now"));
}

TEST(RestartedJob, IsTheSameJobAndAnotherLaunchIsNot) {
  const auto job = [] {
    return lines_of(Job({"run", "--rdzv-id=name", "--max-restarts=1", "sh", "-c",
                         "echo $LOCKSTEP_JOB_ID; exit $((1 - TORCHELASTIC_RESTART_COUNT))"})
                        .wait()
                        .out);
  };
  const auto first = job(), second = job();
  ASSERT_THAT(first, SizeIs(2));
  EXPECT_THAT(first[0], SizeIs(16));
  EXPECT_EQ(first[0], first[1]);
  EXPECT_NE(first, second);
}

TEST(RestartedJob, TheLastFailureIsTheExitStatus) {
  const Result result = Job(restarting("1", "exit $((5 + TORCHELASTIC_RESTART_COUNT))")).wait();
  EXPECT_EQ(result.exit_code, 6);
  EXPECT_THAT(result.err, HasSubstr("no restart is left of 1"));
}

TEST(RestartedJob, EachAttemptHasAControlSegmentAtEpochZeroAndASocketOfItsOwn) {
  // The second attempt's rank 0 waits for a failure in its own segment, and must not see the
  // first one's. It is not to be ended by SIGTERM before it has begun.
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  Job job(
      restarting(
          "1",
          "test $RANK = 0 && { trap '' TERM; echo port=$MASTER_PORT; exec \"$SELF\" rank watch; }; "
          "exit $((7 + TORCHELASTIC_RESTART_COUNT))"),
      {.environment = {{"SELF", self}}});
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 8);
  EXPECT_THAT(result.out, HasSubstr("[rank 0] rank 1 exited with status 7\n"));
  EXPECT_THAT(result.out, HasSubstr("[rank 0] rank 1 exited with status 8\n"));
}

TEST(RestartedJob, NothingOfTheFirstAttemptIsLeftWhenTheSecondStarts) {
  Presence presence;
  const Result result =
      Job(restarting(
              "1",
              "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then exec 9>$FIFO; setsid sleep 1000 & "
              "echo $!; test $RANK = 1 && exit 1; wait; else ls /proc; fi"),
          {.environment = {{"FIFO", presence.path()}}})
          .wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(presence.everybody_left(0ms));
}

TEST(RestartedJob, ASignalDuringThePauseEndsIt) {
  // Failures in turn of two ways, which are no loop, until the pause is long.
  Job job(restarting("50", "exit $((1 + TORCHELASTIC_RESTART_COUNT % 2))"));
  ASSERT_TRUE(job.await_error("restart 6 of 50, in 4 s"));
  kill(job.pid(), SIGQUIT);  // a question
  ASSERT_TRUE(job.await_error("no rank runs on this host at the moment"));
  kill(job.pid(), SIGTERM);
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.err, Not(HasSubstr("restart 7")));
}

TEST(RestartedJob, ANegativeNumberIsRefused) {
  const Result result = Job({"run", "--max-restarts=-1", "true"}).wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("--max-restarts"));
}

}  // namespace
}  // namespace lockstep::launch::testing

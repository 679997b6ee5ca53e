// What a launcher says about a job that fails, or that is asked where it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/diagnosis/failure_report.h"
#include "launch/diagnosis/failure_summary.h"
#include "launch/job.h"
#include "launch/job/outcome.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;
namespace fs = std::filesystem;

// Rank 1 ends with status 1 after 2 s, rank 0 before it with 3 after 1 s, both by themselves.
Outcome two_failures() {
  Outcome outcome;
  outcome.ends = {{0, 100, 3 << 8, {}, Push::None, 1000}, {1, 101, 1 << 8, {}, Push::None, 2000}};
  outcome.seen = {{.rank = 0}, {.rank = 1}};
  return outcome;
}

TEST(FirstFailure, IsTheFirstEndWithoutOtherWord) { EXPECT_EQ(first_failure(two_failures()), 0); }

TEST(FirstFailure, IsTheFirstThatSaidSo) {
  Outcome outcome = two_failures();
  outcome.seen[1].log.failure = {500, flight::Blame::Own, "x"};
  EXPECT_EQ(first_failure(outcome), 1);
}

TEST(FirstFailure, AnEchoIsNone) {
  Outcome outcome = two_failures();
  outcome.seen[0].log.failure = {500, flight::Blame::Peer, "rank 1 is gone"};
  EXPECT_EQ(first_failure(outcome), 1);
  outcome.seen[1].log.failure = {400, flight::Blame::Peer, "rank 0 is gone"};
  EXPECT_EQ(first_failure(outcome), 1);  // two echoes: the first
}

TEST(FirstFailure, AKillIsNoEchoWhateverTheRankHadSaid) {
  Outcome outcome = two_failures();
  outcome.ends[1].wait_status = SIGKILL;
  outcome.seen[1].log.failure = {500, flight::Blame::Peer, "x"};
  outcome.seen[0].log.failure = {900, flight::Blame::Peer, "rank 1 was killed"};
  EXPECT_EQ(first_failure(outcome), 1);
}

TEST(FirstFailure, NotWhatTheLauncherEnded) {
  Outcome outcome = two_failures();
  outcome.ends[0].push = Push::Asked;
  EXPECT_EQ(first_failure(outcome), 1);
  outcome.ends[1].push = Push::Killed;
  EXPECT_EQ(first_failure(outcome), std::nullopt);
  // Unless it had said that it fails, and could not end in time.
  outcome.seen[0].log.failure = {900, flight::Blame::Own, "x"};
  outcome.cause = first_failure(outcome);
  EXPECT_EQ(outcome.cause, 0);
  EXPECT_EQ(outcome.exit_code(), 1);
}

TEST(FailureSummary, NamesARankThatHasExitedWhileOthersWaitedForIt) {
  Outcome outcome = two_failures();
  outcome.ends[0].wait_status = 0;
  outcome.cause = 1;
  const auto first_line = [&](const std::string& words, flight::Blame blame) {
    outcome.seen[1].log.failure = {900, blame, words};
    return report(outcome).front();
  };
  const std::string failed = "rank 1 failed first: it exited with status 1";
  const std::string early = "rank 0 exited with status 0 while others waited for it; " + failed;
  EXPECT_THAT(first_line("barrier cannot go on: rank 0 exited with status 0", flight::Blame::Peer),
              StartsWith(early));
  EXPECT_THAT(first_line("cannot go on: rank 1 (rank 0 of the world) exited with status 0",
                         flight::Blame::Peer),
              StartsWith(early));
  EXPECT_THAT(first_line("barrier was late", flight::Blame::Peer), StartsWith(failed));
  EXPECT_THAT(first_line("row 17, as rank 0 exited", flight::Blame::Own), StartsWith(failed));
}

TEST(FailurePage, SaysWhetherTheRanksWereAlikeWhenLastCompared) {
  Outcome outcome = two_failures();
  outcome.cause = 0;
  outcome.failed_ns = 3'000'000'000;
  outcome.seen[1].log.comparison = {1'000'000'000, "pass 300 of Ddp 1: the ranks are the same"};
  EXPECT_THAT(failure_report(outcome, {}),
              HasSubstr("rank 1\n  -2.000000 s: compared with the other ranks, pass 300 of Ddp 1: "
                        "the ranks are the same\n"));
}

TEST(Straggling, NamesWhoTheOthersWaitForAndInWhat) {
  std::vector<Seen> ranks = {{.rank = 4}, {.rank = 5}, {.rank = 6}};
  const uint64_t for_ever = uint64_t{1} << 60;
  ranks[0].log.busy_ns = {for_ever, 0};
  ranks[2].log.busy_ns = {for_ever, 0};
  EXPECT_THAT(Straggling(3).lines(ranks).back(),
              HasSubstr("the others wait for rank 5, which computes: 0 % of its time"));
  ranks[1].log.busy_ns = {0, for_ever};
  EXPECT_THAT(Straggling(3).lines(ranks).back(), HasSubstr("rank 5, which waits for data"));
  ranks[1].log.busy_ns = {for_ever, 0};
  EXPECT_THAT(Straggling(3).lines(ranks).back(), HasSubstr("rank 6: in no collective so far"));
}

TEST(Diagnosis, TheCauseIsNamedAndNotTheEcho) {
  const test::Folder folder;
  const Result result = Job(rank_args("echo"), {.environment = {{"CHORUS", folder.path()}}}).wait();
  EXPECT_EQ(result.exit_code, 3);
  auto lines = lines_of(result.err);
  ASSERT_GE(lines.size(), 3u);
  lines.resize(3);  // rank 1 is asked for its stack, and may have the time to answer
  EXPECT_THAT(lines,
              ElementsAre(MatchesRegex("\\[lockstep\\] rank 1 failed first: it exited with status "
                                       "3 after .* s \\(pid .*\\)"),
                          "[lockstep]   it said: bad data in row 17",
                          "[lockstep]   rank 0: exited with status 1; it said: rank 1 gave up"));
}

TEST(Report, EchoesThatDifferInTheirRankAloneShareALine) {
  auto args = rank_args("chorus");
  args[1] = "--nproc-per-node=6";
  const test::Folder folder;
  const Result result = Job(args, {.environment = {{"CHORUS", folder.path()}}}).wait();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err,
              HasSubstr("  ranks 0, 3-5: exited with status 1; each said: all_reduce #9 "
                        "cannot go on: rank 1 exited\n"));
  EXPECT_THAT(result.err,
              HasSubstr("  rank 2: exited with status 1; it said: all_reduce #9 on rank "
                        "2 (rank 1 of its group) cannot go on"));
}

TEST(Report, PlacesThatDifferInTheirTimeAloneShareALine) {
  Outcome outcome = two_failures();
  outcome.cause = 1;
  outcome.failed_ns = 1'000'000'000;
  flight::Operation operation{.start_ns = 1, .number = 7};
  std::snprintf(operation.what.data(), operation.what.size(), "barrier");
  for (int rank = 0; rank < 4; ++rank) {
    Seen seen{.rank = rank};
    seen.log = {.calls = 1, .last = {operation}, .blocked_in = 1};
    seen.log.blocked_since_ns = 500'000'000 + static_cast<uint64_t>(rank) * 100'000'000;
    outcome.seen_first.push_back(seen);
  }
  EXPECT_THAT(report(outcome), Contains("  ranks 0-3: in barrier #7, for 0.20 to 0.50 s"));
}

TEST(Report, SaysWhetherMemoryWasShort) {
  Outcome outcome = two_failures();
  outcome.ends[0].wait_status = SIGKILL;
  outcome.cause = 0;
  EXPECT_THAT(report(outcome), Contains(HasSubstr("hint: if nobody sent SIGKILL")));
  outcome.out_of_memory = 0;
  EXPECT_THAT(report(outcome), Contains(HasSubstr("another process sent SIGKILL")));
  outcome.out_of_memory = 1;
  EXPECT_THAT(report(outcome), Contains(HasSubstr("the OOM killer has ended a process")));
}

TEST(Report, SaysOfAStoppedRankThatItWasStopped) {
  Outcome outcome = two_failures();
  outcome.cause = 0;
  outcome.seen_first = {{.rank = 0}, {.rank = 1, .state = 'T'}};
  const auto lines = report(outcome);
  EXPECT_THAT(lines,
              Contains("  rank 1: in no collective so far (its process was stopped, by SIGSTOP "
                       "or a debugger)"));
  EXPECT_THAT(lines, Not(Contains(HasSubstr("kill -CONT"))));  // there is nobody left
}

TEST(Report, WhereARankLeavesAfterItHasSaidWhyIsNoPlace) {
  Outcome outcome = two_failures();
  outcome.cause = 1;
  outcome.failed_ns = 500;
  outcome.seen[0].log.failure = {600, flight::Blame::Peer, "rank 1 is gone"};
  outcome.seen[0].log.stack = flight::Stack{.at_ns = 700, .frames = {{"/no/such", 1}}};
  EXPECT_THAT(report(outcome), Not(Contains(HasSubstr("/no/such"))));
  EXPECT_THAT(report(outcome), Not(Contains(HasSubstr("stacks"))));
  outcome.ends[0].push = Push::Killed;  // it has not ended by itself: where does it hang?
  EXPECT_THAT(report(outcome), Contains(HasSubstr("stacks")));
}

TEST(Straggling, AStoppedRankIsNotComputing) {
  std::vector<Seen> ranks = {{.rank = 0}, {.rank = 1, .state = 'T', .pid = 4711}};
  ranks[0].log.busy_ns = {uint64_t{1} << 60, 0};
  const auto lines = Straggling(2).lines(ranks);
  EXPECT_THAT(lines, Contains("  rank 1: in no collective so far; stopped (kill -CONT 4711)"));
  EXPECT_THAT(lines.back(), HasSubstr("the others wait for rank 1, which is stopped"));
}

TEST(Straggling, NobodyWaitsForTheOnlyRank) {
  EXPECT_EQ(Straggling(1).lines({{.rank = 0, .state = 'T', .pid = 4711}}).back(),
            "  rank 0 is stopped, by SIGSTOP or a debugger");
}

TEST(Diagnosis, AnExceptionThatNobodyCatchesIsQuoted) {
  const Result result = Job(rank_args("uncaught")).wait();
  EXPECT_EQ(result.exit_code, 128 + SIGABRT);
  EXPECT_THAT(result.err, HasSubstr("it was killed by SIGABRT"));
  EXPECT_THAT(result.err, HasSubstr("it said: an uncaught exception: nobody catches this"));
  // The stack is there already.
  EXPECT_THAT(result.err, HasSubstr("their stacks"));
  EXPECT_THAT(result.err, Not(HasSubstr("hint: to see where")));
}

class StuckTest : public ::testing::Test {
 protected:
  const test::Folder folder_{test::Folder::On::Disk};
  std::string gate_;

  StuckTest() {
    gate_ = folder_ / "gate";
    if (mkfifo(gate_.c_str(), 0600) != 0) throw std::runtime_error("mkfifo");
  }
  void open_gate() { std::ofstream(gate_) << "go\n"; }
};

TEST_F(StuckTest, TheReportSaysWhereTheRanksWere) {
  Job job(rank_args("stuck"), {.environment = {{"GATE", gate_}}});
  ASSERT_TRUE(job.await("stuck", 2));
  open_gate();
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(
      result.err,
      HasSubstr("[lockstep] where they were when the first failure was seen:\n[lockstep]   rank 0: "
                "in barrier #30, for "));
  EXPECT_THAT(result.err, HasSubstr("rank 1: in no collective; the last was all_reduce sum #20 "
                                    "(float32 x 2), "));
}

TEST_F(StuckTest, ASignalAsksWhereTheRanksAreAndDisturbsNothing) {
  Job job(rank_args("stuck"), {.environment = {{"GATE", gate_}}});
  ASSERT_TRUE(job.await("stuck", 2));
  for (const int signal : {SIGUSR2, SIGQUIT}) {
    job.forget_errors();
    kill(job.pid(), signal);
    ASSERT_TRUE(job.await_error("rank 0: in barrier #30, for "));
    ASSERT_TRUE(job.await_error("rank 1: in no collective; the last was all_reduce sum"));
  }
  open_gate();
  EXPECT_EQ(job.wait().exit_code, 7);
}

TEST_F(StuckTest, TheFolderHoldsAPageAndEachRanksError) {
  Job job(rank_args("stuck", {"--log-dir", folder_.path(), "--rdzv-id=job"}),
          {.environment = {{"GATE", gate_}}});
  ASSERT_TRUE(job.await("stuck", 2));
  open_gate();
  const Result result = job.wait();
  const size_t at = result.err.find("more in " + folder_ / "job_");
  ASSERT_NE(at, std::string::npos) << result.err;
  const std::string path = lines_of(result.err.substr(at + 8))[0];
  const std::string page = test::contents(path);
  EXPECT_THAT(page, HasSubstr("rank 1 failed first: it exited with status 7"));
  EXPECT_THAT(page, HasSubstr("last 3 of 3 calls"));
  EXPECT_THAT(page, HasSubstr("not over  barrier #30"));
  // Relative to the failure, so before it.
  EXPECT_THAT(page, ContainsRegex("\n +-[0-9]+\\.[0-9]+ s +not over  barrier"));
  EXPECT_THAT(page, HasSubstr("all_reduce sum #20 (float32 x 2)"));
}

TEST_F(StuckTest, TheErrorFileIsTorchrunsJson) {
  const Result result = Job(rank_args("echo", {"--log-dir", folder_.path()}),
                            {.environment = {{"CHORUS", folder_.path()}}})
                            .wait();
  std::string path = lines_of(result.err.substr(result.err.find("more in ") + 8))[0];
  const fs::path attempt = fs::path(path).parent_path();
  const auto error = nlohmann::json::parse(test::contents(attempt / "1" / "error.json"));
  EXPECT_EQ(error["message"]["message"], "bad data in row 17");
  EXPECT_TRUE(error["message"]["extraInfo"].contains("timestamp"));
}

TEST(Diagnosis, WhatAProgramHasWrittenIntoItsErrorFileIsQuoted) {
  const test::Folder folder{test::Folder::On::Disk};
  const auto run = [&](const std::string& error) {
    return Job({"run", "--log-dir", folder.path(), "sh", "-c",
                "printf '%s' '" + error + "' >$TORCHELASTIC_ERROR_FILE; exit 3"})
        .wait();
  };
  const std::string said =
      "exited with status 3 after .*\n.lockstep.   it said: ValueError: row 17";
  // As torch.distributed.elastic writes it, and its short form.
  for (const std::string error :
       {R"({"message": {"message": "ValueError: row 17", "extraInfo": {"timestamp": "1"}}})",
        R"({"message": "ValueError: row 17", "timestamp": 1})"}) {
    const Result result = run(error);
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_THAT(result.err, ContainsRegex(said));
  }
  const std::string many(999, 'a');
  EXPECT_THAT(run("{\"message\": \"" + many + "\u00e9\u00e9\"}").err,
              HasSubstr("it said: " + many + " ...\n"));
  for (const std::string damaged : {R"({"message": {"mess)", "[1]", R"({"message": 7})", ""}) {
    const Result result = run(damaged);
    EXPECT_EQ(result.exit_code, 3) << damaged;
    EXPECT_THAT(result.err, HasSubstr("rank 0 failed first: it exited with status 3"));
    EXPECT_THAT(result.err, Not(HasSubstr("it said")));
  }
}

TEST(Diagnosis, LastWordsAreOnThePage) {
  const test::Folder folder{test::Folder::On::Disk};
  const Result result = Job({"run", "--nproc-per-node=2", "--log-dir", folder.path(), "sh", "-c",
                             "test $RANK = 0 && exec sleep 1000; echo oh no >&2; exit 2"})
                            .wait();
  const std::string path = lines_of(result.err.substr(result.err.find("more in ") + 8))[0];
  EXPECT_THAT(test::contents(path), HasSubstr("  last on stderr\n    | oh no\n"));
}

TEST(Diagnosis, APageThatCannotBeWrittenIsSaid) {
  const test::Folder folder{test::Folder::On::Disk};
  const Result result = Job({"run", "--log-dir", folder.path(), "sh", "-c",
                             "ln -s /dev/full $(dirname $TORCHELASTIC_ERROR_FILE)/../failure.txt; "
                             "exit 3"})
                            .wait();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, ContainsRegex("failure.txt: No space left on device"));
  EXPECT_THAT(result.err, Not(HasSubstr("more in")));
}

TEST(Diagnosis, WhatWasRedirectedIsQuotedAndItsFileNamed) {
  const test::Folder folder{test::Folder::On::Disk};
  const std::string script = "test $RANK = 0 && exec sleep 1000; echo oh no >&2; exit 2";
  const Result result =
      Job({"run", "--nproc-per-node=2", "--redirects=3", "--rdzv-id=job", "sh", "-c", script},
          {.environment = {{"TMPDIR", folder.path()}}})
          .wait();
  EXPECT_THAT(result.err, ContainsRegex("output of the ranks goes to " + folder / "job_"));
  EXPECT_THAT(result.err, ContainsRegex("the end of its stderr \\(all of it in " + folder.path() +
                                        "/job_[^ ]*/attempt_0/1/stderr.log\\):\n.*  \\| oh no\n"));
  const std::string path = lines_of(result.err.substr(result.err.find("more in ") + 8))[0];
  EXPECT_THAT(test::contents(path), HasSubstr("  last on stderr\n    | oh no\n"));
  // Of one whose output is not shown, too.
  const Result hidden =
      Job({"run", "--nproc-per-node=2", "--local-ranks-filter=0", "sh", "-c", script}).wait();
  EXPECT_THAT(hidden.err, HasSubstr("the end of its stderr:\n[lockstep]   | oh no\n"));
}

}  // namespace
}  // namespace lockstep::launch::testing

// Readers that do not read and disks that stand still: the launcher goes on to hear signals and the
// other launchers, and ends when asked.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "core/files/fd.h"
#include "launch/job.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class StalledOutput : public ::testing::Test {
 protected:
  const test::Folder folder_{test::Folder::On::Disk};
  Presence presence_;
};

TEST_F(StalledOutput, OfAnotherUserDoesNotKeepTheLauncherFromEnding) {
  // Both ranks fill every buffer on the way.
  Job job(script_args(2, "exec 9>$FIFO; exec yes"),
          {.environment = {{"FIFO", presence_.path()}}, .is_output_anothers = true});
  job.leave_unread();
  while (job.unread_bytes() < 48 << 10) std::this_thread::yield();  // of 64 KiB
  kill(job.pid(), SIGTERM);
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.err, HasSubstr("stopped by SIGTERM"));
  EXPECT_TRUE(presence_.everybody_left(std::chrono::milliseconds(0)));
}

TEST_F(StalledOutput, OfAnotherUserComesWhole) {
  Job job(script_args(2, "seq 20000"), {.is_output_anothers = true});
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(lines_of(result.out).size(), 40'000U);
}

TEST_F(StalledOutput, AtTheEndIsWaitedForNoLongerThanItStandsStill) {
  Job job(
      script_args(2,
                  "seq -f '%0100.0f' 2000; test $RANK = 1 || : >$DONE; "
                  "until test -e $DONE; do sleep 0.01; done; exit $((4 * RANK))"),
      {.environment = {{"LOCKSTEP_OUTPUT_TIMEOUT", "1"}, {"DONE", presence_.path() + ".done"}}});
  job.leave_unread();
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 4);
  const auto said = lines_of(result.err);
  EXPECT_THAT(said.back(), MatchesRegex("\\[lockstep\\] not written: .* bytes for stdout; nothing "
                                        "was taken for 1 s \\(LOCKSTEP_OUTPUT_TIMEOUT\\)"));
  const long lost = std::stol(said.back().substr(said.back().find(": ") + 2));
  EXPECT_EQ(static_cast<long>(result.out.size()) + lost,
            2 * 2000 * long{sizeof("[rank 0] ") + 100});
}

TEST_F(StalledOutput, IsWrittenBeforeARestartThatCannotStart) {
  const std::string program = folder_ / "program";
  std::ofstream(program) << "#!/bin/sh\nseq -f '%0100.0f' 2000\n"
                            "test $RANK = 1 || { : >$FOLDER/done; exec sleep 1000; }\n"
                            "until test -e $FOLDER/done; do sleep 0.01; done; rm $0; exit 4\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  Job job({"run", "--nproc-per-node=2", "--max-restarts=1", program},
          {.environment = {{"FOLDER", folder_.path()}, {"LOCKSTEP_OUTPUT_TIMEOUT", "1"}}});
  job.leave_unread();
  const Result result = job.wait();
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(lines_of(result.err).back(), HasSubstr("cannot start"));
  const std::string said = "not written: ";
  const size_t at = result.err.find(said);
  ASSERT_NE(at, std::string::npos) << result.err;
  EXPECT_EQ(static_cast<long>(result.out.size()) + std::stol(result.err.substr(at + said.size())),
            2 * 2000 * long{sizeof("[rank 0] ") + 100});
}

TEST_F(StalledOutput, AWrongTimeoutIsRefused) {
  const Result result = run_script(1, "true", {.environment = {{"LOCKSTEP_OUTPUT_TIMEOUT", "0"}}});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("LOCKSTEP_OUTPUT_TIMEOUT"));
}

// In the second attempt a file of the second host's rank 2 is a pipe: opening it waits for a
// reader, writing to it for one that reads.
class StalledDisk : public StalledOutput, public ::testing::WithParamInterface<bool> {
 protected:
  static constexpr const char* kScript =
      "if test $TORCHELASTIC_RESTART_COUNT = 0; then test $RANK = 2 || exec sleep 1000; "
      "new=$(dirname $(dirname $(dirname $TORCHELASTIC_ERROR_FILE)))/attempt_1/0; "
      "mkdir -p $new; mkfifo $new/stdout.log; ln -s $new/stdout.log $FOLDER/file; "
      "echo made; read line; exit 3; fi; "
      "echo again >&2; test $RANK = 2 && seq 50000; exec sleep 1000";

  std::vector<std::string> flags(int host) const {
    std::vector<std::string> all = {"--max-restarts=1", "--grace=0.1"};
    if (host == 1) all.insert(all.end(), {"--tee=3", "--log-dir=" + folder_.path()});
    all.insert(all.end(), {"sh", "-c", kScript});
    return all;
  }
};

TEST_P(StalledDisk, OfOneHostIsNoReasonToLoseIt) {
  const bool is_read = GetParam();
  const TwoHosts hosts;
  const auto settings = TwoHosts::with_token({.environment = {{"FOLDER", folder_.path()}}});
  Job first(hosts.args(0, flags(0)), settings);
  Job second(hosts.args(1, flags(1)), settings);
  ASSERT_TRUE(second.await("made"));
  Fd reader;
  if (is_read) reader = Fd(open((folder_ / "file").c_str(), O_RDONLY | O_NONBLOCK));
  second.close_input();
  if (is_read) {
    ASSERT_TRUE(second.await("30000\n"));  // it is stuck by then: a pipe holds 64 KiB
  } else {
    ASSERT_TRUE(first.await_error("again"));
  }
  kill(first.pid(), SIGTERM);
  for (Job* job : {&first, &second}) {
    const Result result = job->wait();
    EXPECT_EQ(result.exit_code, 128 + SIGTERM) << result.err;
    EXPECT_THAT(result.err, HasSubstr("got SIGTERM"));
  }
  if (is_read) {
    EXPECT_THAT(second.err(), HasSubstr("bytes for log files"));
  }
}

INSTANTIATE_TEST_SUITE_P(All, StalledDisk, ::testing::Bool(),
                         [](const auto& one) { return one.param ? "InAWrite" : "InAnOpen"; });

TEST_F(StalledOutput, AFailurePageThatCannotBeWrittenIsSaid) {
  const Result result = Job({"run", "--nproc-per-node=2", "--log-dir", folder_.path(), "sh", "-c",
                             "test $RANK = 0 || exit 3; mkdir $(dirname $(dirname "
                             "$TORCHELASTIC_ERROR_FILE))/failure.txt; "
                             "exec sleep 1000"})
                            .wait();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr("failure.txt: Is a directory; the job continues without"));
}

}  // namespace
}  // namespace lockstep::launch::testing

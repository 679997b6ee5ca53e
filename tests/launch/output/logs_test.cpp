// Files of a job: redirected, tee'd, filtered, and where they lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "launch/job.h"
#include "launch/output/streams.h"
#include "lockstep/core/error.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;
namespace fs = std::filesystem;

TEST(Streams, OneNumberIsForAllRanks) {
  const auto both = StreamChoice::parse("--tee", "3");
  EXPECT_TRUE(both.covers(0, StreamChoice::Out));
  EXPECT_TRUE(both.covers(99, StreamChoice::Err));
  const auto error = StreamChoice::parse("--tee", "2");
  EXPECT_FALSE(error.covers(0, StreamChoice::Out));
  EXPECT_TRUE(error.covers(0, StreamChoice::Err));
  EXPECT_TRUE(StreamChoice::parse("--tee", "0").is_empty());
}

TEST(Streams, AMapNamesAnyLocalRank) {
  const auto some = StreamChoice::parse("--tee", "0:3,12:1");
  EXPECT_TRUE(some.covers(12, StreamChoice::Out));
  EXPECT_FALSE(some.covers(12, StreamChoice::Err));
  EXPECT_FALSE(some.covers(1, StreamChoice::Out));
  EXPECT_EQ(some.last_rank(), 12);
}

TEST(Streams, WrongWordsAreRefused) {
  for (const char* text : {"", "4", "-1", "x", "0:", ":1", "0:4", "0:1,", "0:1,,1:1", "5000:1"}) {
    EXPECT_THROW(StreamChoice::parse("--tee", text), ConfigError) << text;
  }
}

class LogsTest : public ::testing::Test {
 protected:
  const test::Folder folder_{test::Folder::On::Disk};

  Result run(std::vector<std::string> flags, const std::string& script, int ranks = 2) {
    std::vector<std::string> args = {"run", "--nproc-per-node=" + std::to_string(ranks),
                                     "--rdzv-id=job"};
    args.insert(args.end(), flags.begin(), flags.end());
    args.insert(args.end(), {"sh", "-c", script});
    return Job(args, {.environment = {{"TMPDIR", folder_.path()}}}).wait();
  }
  // The one folder of the only job.
  std::string job_folder() {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_.path())) found.push_back(entry.path());
    EXPECT_EQ(found.size(), 1u);
    return found.empty() ? "" : found.front();
  }
  // Of a file in it; "none" when there is no such file.
  std::string content(const std::string& name) {
    std::ifstream file(job_folder() + "/" + name);
    if (!file) return "none";
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
};

TEST_F(LogsTest, NoFilesUnlessAskedFor) {
  // As torchrun has it with --log-dir /dev/null.
  EXPECT_EQ(run({}, "echo \"<${TORCHELASTIC_ERROR_FILE-unset}>\"", 1).out, "<>\n");
  EXPECT_TRUE(fs::is_empty(folder_.path()));
  run({"--log-dir=/dev/null"}, "true");
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(LogsTest, RedirectedStreamsAreInFilesOnly) {
  const Result result =
      run({"--log-dir", folder_.path(), "--redirects=3"}, "echo out $RANK; echo err $RANK >&2");
  EXPECT_EQ(result.out + result.err, "");
  EXPECT_EQ(content("attempt_0/0/stdout.log"), "out 0\n");
  EXPECT_EQ(content("attempt_0/1/stdout.log"), "out 1\n");
  EXPECT_EQ(content("attempt_0/1/stderr.log"), "err 1\n");
}

TEST_F(LogsTest, FilesHaveTheRightsThatTheUmaskLeaves) {
  const mode_t before = umask(002);
  run({"--log-dir", folder_.path(), "--redirects=1"}, "true", 1);
  umask(before);
  EXPECT_EQ(fs::status(job_folder() + "/attempt_0/0/stdout.log").permissions(), fs::perms(0664));
}

TEST_F(LogsTest, TeeWritesBothAndTheFileHasNoTag) {
  const Result result =
      run({"--log_dir=" + folder_.path(), "-t1"}, "echo out $RANK; echo err $RANK >&2");
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] out 0", "[rank 1] out 1"));
  EXPECT_THAT(lines_of(result.err), UnorderedElementsAre("[rank 0] err 0", "[rank 1] err 1"));
  EXPECT_EQ(content("attempt_0/1/stdout.log"), "out 1\n");
  EXPECT_EQ(content("attempt_0/1/stderr.log"), "none");
}

TEST_F(LogsTest, AnyLocalRankCanBeChosen) {
  run({"--log-dir", folder_.path(), "-r", "11:1"}, "echo out $RANK", 12);
  EXPECT_EQ(content("attempt_0/11/stdout.log"), "out 11\n");
  EXPECT_EQ(content("attempt_0/1/stdout.log"), "none");
}

TEST_F(LogsTest, ARankThatIsNotThereIsRefused) {
  for (const std::string flag : {"--redirects=2:1", "--tee=2:1", "--local-ranks-filter=2"}) {
    const Result result = run({flag}, "true");
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.err, HasSubstr("there is no local rank 2; this host has 0 to 1"));
  }
}

TEST_F(LogsTest, TheFilterHidesButFilesAreWritten) {
  const Result result = run({"--log-dir", folder_.path(), "--tee=3", "--local-ranks-filter=1"},
                            "echo out $RANK; echo err $RANK >&2");
  EXPECT_EQ(result.out, "[rank 1] out 1\n");
  EXPECT_EQ(result.err, "[rank 1] err 1\n");
  EXPECT_EQ(content("attempt_0/0/stdout.log"), "out 0\n");
  EXPECT_EQ(run({"--local-ranks-filter=0"}, "echo $RANK", 3).out, "[rank 0] 0\n");
}

TEST_F(LogsTest, LinesThatHoldATextAreInOneMoreFile) {
  const std::string script =
      "echo loss 1 $RANK; echo \"a,b\"; echo other; printf 'last loss'; echo loss $RANK >&2";
  const Result result =
      run({"--log-dir", folder_.path(), "--duplicate-stdout-filters=loss,a,,b"}, script);
  EXPECT_THAT(lines_of(result.out),
              UnorderedElementsAre("[rank 0] loss 1 0", "[rank 0] a,b", "[rank 0] other",
                                   "[rank 0] last loss", "[rank 1] loss 1 1", "[rank 1] a,b",
                                   "[rank 1] other", "[rank 1] last loss"));
  EXPECT_THAT(lines_of(content("attempt_0/filtered_stdout.log")),
              UnorderedElementsAre("[rank 0] loss 1 0", "[rank 0] a,b", "[rank 0] last loss",
                                   "[rank 1] loss 1 1", "[rank 1] a,b", "[rank 1] last loss"));
  EXPECT_EQ(content("attempt_0/filtered_stderr.log"), "none");
}

TEST_F(LogsTest, FiltersSeeWhatIsRedirectedHiddenOrOfOneRank) {
  const Result result = run({"--log-dir", folder_.path(), "--redirects=2",
                             "--duplicate_stderr_filters", "loss", "--local-ranks-filter=1"},
                            "echo loss $RANK >&2; echo other >&2");
  EXPECT_EQ(result.out + result.err, "");
  EXPECT_EQ(content("attempt_0/0/stderr.log"), "loss 0\nother\n");
  EXPECT_THAT(lines_of(content("attempt_0/filtered_stderr.log")),
              UnorderedElementsAre("[rank 0] loss 0", "[rank 1] loss 1"));
  fs::remove_all(job_folder());
  EXPECT_EQ(run({"--duplicate-stdout-filters", "loss"}, "echo loss", 1).out, "[rank 0] loss\n");
  EXPECT_EQ(content("attempt_0/filtered_stdout.log"), "[rank 0] loss\n");
}

TEST_F(LogsTest, EachAttemptHasItsFiles) {
  run({"--log-dir", folder_.path(), "--redirects=1", "--max-restarts=1"},
      "echo try $TORCHELASTIC_RESTART_COUNT; exit 1", 1);
  EXPECT_EQ(content("attempt_0/0/stdout.log"), "try 0\n");
  EXPECT_EQ(content("attempt_1/0/stdout.log"), "try 1\n");
}

// As on a disk that is full by then: folders of that name cannot be made.
TEST_F(LogsTest, ARestartWhoseFilesCannotBeMadeGoesOnAndThatIsSaidOnce) {
  const Result result = run({"--log-dir", folder_.path(), "--redirects=1", "--max-restarts=2"},
                            "echo try $TORCHELASTIC_RESTART_COUNT ${TORCHELASTIC_ERROR_FILE:-no}; "
                            "case $TORCHELASTIC_RESTART_COUNT in "
                            "0) job=${TORCHELASTIC_ERROR_FILE%/attempt_0/*}; "
                            ": > $job/attempt_1; : > $job/attempt_2; exit 3;; "
                            "1) exit 4;; esac",
                            1);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "try 1 no\ntry 2 no\n");
  const std::string said = "restarts go on without log files: [run] --log-dir: cannot write to '";
  const size_t first = result.err.find(said);
  ASSERT_NE(first, result.err.npos) << result.err;
  EXPECT_EQ(result.err.find(said, first + 1), result.err.npos) << result.err;
}

TEST_F(LogsTest, NamesAreAbsolute) {
  const fs::path folder = fs::relative(folder_.path());
  const Result result = Job({"run", "--rdzv-id=job", "--log-dir", folder, "sh", "-c",
                             "cd / && ls -d ${TORCHELASTIC_ERROR_FILE%/*}"})
                            .wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith("/"));
}

TEST_F(LogsTest, TmpdirIsNamedWhereItHasBeenUsed) {
  const Result result =
      Job({"run", "--redirects=1", "true"}, {.environment = {{"TMPDIR", "/nowhere/at/all"}}})
          .wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("TMPDIR: cannot write to '/nowhere/at/all'"));
}

TEST_F(LogsTest, RanksFindTheErrorFilesName) {
  const Result result = run({"--log-dir", folder_.path()}, "echo $TORCHELASTIC_ERROR_FILE", 1);
  EXPECT_THAT(result.out, MatchesRegex(folder_ / "job_....../attempt_0/0/error.json\n"));
}

TEST_F(LogsTest, NoErrorFileIsShownBeforeItsFolderIsMade) {
  EXPECT_THAT(run({"--print-env"}, "true").out, HasSubstr("rank 0: TORCHELASTIC_ERROR_FILE=\n"));
  EXPECT_THAT(run({"--print-env", "--log-dir", folder_.path()}, "true").out,
              ::testing::Not(HasSubstr("TORCHELASTIC_ERROR_FILE")));
}

TEST_F(LogsTest, WithoutAFolderOneIsMadeBelowTmpdir) {
  run({"--redirects=1"}, "echo out $RANK");
  EXPECT_EQ(content("attempt_0/1/stdout.log"), "out 1\n");
}

TEST_F(LogsTest, AFolderThatCannotBeMadeIsNamed) {
  const Result result = run({"--log-dir", "/proc/nowhere"}, "true");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("--log-dir: cannot write to '/proc/nowhere'"));
}

TEST_F(LogsTest, ThePrefixIsATemplate) {
  const Result result =
      run({"--log-line-prefix-template=<${role_name} ${local_rank}/${rank}>: ", "--role=worker"},
          "echo x");
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("<worker 0/0>: x", "<worker 1/1>: x"));
}

}  // namespace
}  // namespace lockstep::launch::testing

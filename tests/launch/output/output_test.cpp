// Tags and whole lines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "launch/job.h"
#include "launch/output/line_prefixer.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

// What LinePrefixer makes of the pieces, fed one by one.
std::string tagged(const std::vector<std::string>& pieces,
                   LinePrefixer::Target target = LinePrefixer::Target::File) {
  LinePrefixer lines("> ", target);
  std::string out;
  for (const auto& piece : pieces) lines.feed(piece, out);
  lines.finish(out);
  return out;
}

TEST(Lines, EachIsTagged) { EXPECT_EQ(tagged({"a\nb\n"}), "> a\n> b\n"); }
TEST(Lines, AnEmptyLineIsALine) { EXPECT_EQ(tagged({"\n\n"}), "> \n> \n"); }
TEST(Lines, PiecesAreJoined) { EXPECT_EQ(tagged({"a", "b", "c\nd", "\n"}), "> abc\n> d\n"); }
TEST(Lines, AnUnfinishedLineIsEnded) { EXPECT_EQ(tagged({"a\nb"}), "> a\n> b\n"); }
TEST(Lines, NothingGivesNothing) { EXPECT_EQ(tagged({""}), ""); }
TEST(Lines, CarriageReturnAndNewlineAreOneEnd) { EXPECT_EQ(tagged({"a\r\nb\r\n"}), "> a\n> b\n"); }
TEST(Lines, AlsoWhenTwoReadsPartThem) { EXPECT_EQ(tagged({"a\r", "\nb\r", "\n"}), "> a\n> b\n"); }
TEST(Lines, ProgressIsALineInAFile) { EXPECT_EQ(tagged({"1\r2\r3\n"}), "> 1\n> 2\n> 3\n"); }
TEST(Lines, ProgressMayBeginWithItsReturn) { EXPECT_EQ(tagged({"\r1\r2\n"}), "> 1\n> 2\n"); }
TEST(Lines, ProgressStaysInPlaceInATerminal) {
  EXPECT_EQ(tagged({"1\r2\r\n"}, LinePrefixer::Target::Terminal), "> 1\r> 2\n");
  EXPECT_EQ(tagged({"1\r2\r", "\n"}, LinePrefixer::Target::Terminal), "> 1\r> 2\r\n");
}
TEST(Lines, BinaryBytesPass) {
  const std::string bytes("\0\xff\x80\x1b\n", 5);
  EXPECT_EQ(tagged({bytes}), "> " + bytes);
}
TEST(Lines, AnEndlessLineIsCut) {
  const std::string half(LinePrefixer::kLongest / 2, 'x');
  EXPECT_EQ(tagged({half, half, "y"}), "> " + half + half + "\n> y\n");
}

TEST(LogMultiplexer, LinesOfFourBusyRanksStayWhole) {
  constexpr int kLines = 20'000;
  const Result result = run_script(4, "seq -f \"line %.0f of $RANK\" " + std::to_string(kLines));
  ASSERT_EQ(result.exit_code, 0);
  std::array<int, 4> next = {1, 1, 1, 1};
  for (const std::string& line : lines_of(result.out)) {
    const int rank = line.at(6) - '0';
    ASSERT_TRUE(rank >= 0 && rank < 4) << line;
    const std::string digit = std::to_string(rank);
    ASSERT_EQ(line, "[rank " + digit + "] line " + std::to_string(next[rank]++) + " of " + digit);
  }
  EXPECT_THAT(next, ::testing::Each(kLines + 1));
}

TEST(LogMultiplexer, ALongLineStaysWhole) {
  const Result result = run_script(2, "head -c 300000 /dev/zero | tr '\\0' $RANK; echo");
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] " + std::string(300'000, '0'),
                                                         "[rank 1] " + std::string(300'000, '1')));
}

TEST(LogMultiplexer, StderrIsTaggedOnStderr) {
  const Result result = run_script(2, "echo out; echo err >&2");
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] out", "[rank 1] out"));
  EXPECT_THAT(lines_of(result.err), UnorderedElementsAre("[rank 0] err", "[rank 1] err"));
}

TEST(LogMultiplexer, TheLastWordsOfAKilledRankArrive) {
  EXPECT_THAT(run_script(2, "printf \"last of $RANK\"; test $RANK = 0 || kill -9 $$").out,
              HasSubstr("[rank 1] last of 1\n"));
}

TEST(LogMultiplexer, OneRankWritesAsIfStartedByHand) {
  EXPECT_EQ(run_script(1, "printf 'no tag, no end'").out, "no tag, no end");
}

TEST(LogMultiplexer, AReaderThatLeavesEndsTheJob) {
  for (const int ranks : {1, 2}) {
    Job job(script_args(ranks, "exec yes"));
    ASSERT_TRUE(job.await("y\n"));
    job.stop_reading();
    EXPECT_EQ(job.wait().exit_code, 128 + SIGPIPE) << ranks << " ranks";
  }
}

TEST(LogMultiplexer, AReaderThatDoesNotReadDoesNotHideAFailure) {
  // Rank 0 fills every buffer on the way; rank 1's failure ends the job all the same.
  Presence presence;
  Job job(script_args(2, "exec 9>$FIFO; test $RANK = 0 && exec yes; echo ready; read x; exit 5"),
          {.environment = {{"FIFO", presence.path()}}});
  ASSERT_TRUE(job.await("ready"));
  EXPECT_TRUE(presence.everybody_left());
  EXPECT_EQ(job.wait().exit_code, 5);
}

}  // namespace
}  // namespace lockstep::launch::testing

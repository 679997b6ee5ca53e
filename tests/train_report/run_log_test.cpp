// The log: what is written is read again, and damage costs no more than the lines that have it.
#include "lockstep/train/run_log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/train/run_history.h"
#include "lockstep/train/run_report.h"
#include "support/folder.h"

namespace lockstep::train {
namespace {

using ::testing::HasSubstr;

class TheRunLog : public testing::Test {
 protected:
  std::string path() const { return folder_ / "run/metrics.jsonl"; }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(path()).rdbuf();
    return all.str();
  }
  void write(const std::string& text) const {
    std::filesystem::create_directories(folder_ / "run");
    std::ofstream(path()) << text;
  }

  const test::Folder folder_;
};

const std::string kStart = log_line(RunStart{.ranks = 2}, 1000) + "\n";

std::string step_line(int64_t step, double loss) {
  return log_line(StepReport{.step = step, .loss = loss, .samples = 64 * step}, 1001) + "\n";
}

LogRecord again(const LogRecord& record) {
  double time = 0;
  std::string fault;
  const auto read = parse_log_line(log_line(record, 12.5), time, fault);
  EXPECT_EQ(fault, "");
  EXPECT_EQ(time, 12.5);
  return read.value_or(RunEnd{.outcome = "unreadable"});
}

TEST_F(TheRunLog, EveryRecordIsReadAsItWasWritten) {
  const auto start = std::get<RunStart>(again(RunStart{.ranks = 3,
                                                       .name = "net \"<b>\" \n\x01",
                                                       .resumed_at = 0,
                                                       .total_steps = 7,
                                                       .restart = 2,
                                                       .config = {{"training.seed", "3"}},
                                                       .environment = {{"libtorch", "2.15"}},
                                                       .hosts = {"a", "a", "b"}}));
  EXPECT_EQ(start.ranks, 3);
  EXPECT_EQ(start.name, "net \"<b>\" \n\x01");
  EXPECT_EQ(start.resumed_at, 0);
  EXPECT_EQ(start.total_steps, 7);
  EXPECT_EQ(start.restart, 2);
  EXPECT_EQ(start.config.at("training.seed"), "3");
  EXPECT_EQ(start.environment.at("libtorch"), "2.15");
  EXPECT_EQ(start.hosts[2], "b");

  const auto report = std::get<StepReport>(again(StepReport{
      .step = 100,
      .steps = 50,
      .epoch = 2,
      .seconds = 1.25,
      .loss = 0.1,
      .mean_loss = 0.15,
      .gradient_norm = std::numeric_limits<double>::infinity(),
      .samples = 6400,
      .samples_per_second = 1024.5,
      .values = {{"loss scale", 65536}},
      .ranks = {{0.01, 0.002, 0.001, 0.0005, 1 << 20, 0.75}, {0.01, 0, 0, 0, 2 << 20}}}));
  EXPECT_EQ(report.step, 100);
  EXPECT_EQ(report.steps, 50);
  EXPECT_EQ(report.loss, 0.1);
  EXPECT_EQ(report.mean_loss, 0.15);
  EXPECT_FALSE(report.learning_rate);
  EXPECT_TRUE(std::isinf(*report.gradient_norm));
  EXPECT_EQ(report.values.at("loss scale"), 65536);
  ASSERT_EQ(report.ranks.size(), 2u);
  EXPECT_EQ(report.ranks[0].communication_seconds, 0.002);
  EXPECT_EQ(report.ranks[1].memory_bytes, 2 << 20);
  EXPECT_DOUBLE_EQ(report.ranks[0].working_seconds(), 0.008);
  EXPECT_EQ(report.ranks[0].gpu_busy, 0.75);
  EXPECT_EQ(report.ranks[1].gpu_busy, -1) << "not known";

  const auto evaluation =
      std::get<EvaluationReport>(again(EvaluationReport{.step = 9, .metrics = {{"accuracy", 1}}}));
  EXPECT_EQ(evaluation.metrics.at("accuracy"), 1);
  const auto event = std::get<Event>(
      again(Event{.kind = "warning", .step = 4, .rank = 1, .text = "slow", .advice = "run"}));
  EXPECT_EQ(event.rank, 1);
  EXPECT_EQ(event.advice, "run");
  EXPECT_TRUE(std::get<RunEnd>(again(RunEnd{.outcome = "thrown", .failed = true})).failed);
}

TEST_F(TheRunLog, LinesAreStrictJson) {
  const std::string line =
      log_line(StepReport{.loss = std::nan(""),
                          .values = {{"a\xff\n", -std::numeric_limits<double>::infinity()}}},
               1);
  EXPECT_THAT(line, HasSubstr(R"("loss":"NaN")"));
  EXPECT_THAT(line, HasSubstr(R"("a)"
                              "\xEF\xBF\xBD"
                              R"(\n":"-Infinity")"));
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

TEST_F(TheRunLog, AFileThatWasCutIsGoneOnWith) {
  write(kStart + step_line(1, 0.5) + R"({"type":"step","st)");
  {
    RunLog file(path());
    file.append(StepReport{.step = 2, .loss = 0.25});
  }
  const RunHistory run = read_run(folder_ / "run");
  EXPECT_EQ(run.reports, 2);
  EXPECT_EQ(run.last->step, 2);
  EXPECT_EQ(run.skipped_lines, 1);
  EXPECT_EQ(run.first_fault, "line 3: not a JSON object");
}

TEST_F(TheRunLog, CutAtAnyByteTheWholeLinesAreRead) {
  const std::string whole = kStart + step_line(1, 0.5) + step_line(2, 0.25);
  for (size_t length = 0; length < whole.size(); length += 3) {
    write(whole.substr(0, length));
    if (length + 1 < kStart.size()) {
      EXPECT_THROW(read_run(path()), Error);
      continue;
    }
    const RunHistory run = read_run(path());
    EXPECT_LE(run.skipped_lines, 1);
    // A line that lacks its line feed alone is whole.
    const size_t first = kStart.size() + step_line(1, 0.5).size() - 1;
    EXPECT_EQ(run.reports, length + 1 >= whole.size() ? 2 : length >= first ? 1 : 0) << length;
  }
}

TEST_F(TheRunLog, AFullDiskIsWarnedOfOnceAndLinesGoOnWhenThereIsRoom) {
  // As a full disk does, a limit on the file's size lets a part of a line through. The warning goes
  // to the log of another process.
  testing::internal::CaptureStderr();
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  {
    RunLog file(path());
    // Long, since standard error is a file here, too.
    file.append(RunStart{.name = std::string(4000, 'n')});
    ASSERT_TRUE(file.flush());
    rlimit small = before;
    small.rlim_cur = text().size() + 20;
    setrlimit(RLIMIT_FSIZE, &small);
    file.append(StepReport{.step = 1});
    EXPECT_TRUE(file.flush());
    file.append(StepReport{.step = 2});
    EXPECT_TRUE(file.flush());
    setrlimit(RLIMIT_FSIZE, &before);
    file.append(StepReport{.step = 3});
    EXPECT_TRUE(file.flush());
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("takes no more lines (File too large); training continues"));
  EXPECT_EQ(said.find("takes no more", said.find("takes no more") + 1), std::string::npos);
  const RunHistory run = read_run(path());
  EXPECT_EQ(run.last->step, 3);
  EXPECT_EQ(run.reports, 1);
  EXPECT_EQ(run.skipped_lines, 1);
  ASSERT_EQ(run.events.size(), 1u);
  EXPECT_EQ(run.events[0].text, "2 lines of this log are missing here");
}

TEST_F(TheRunLog, ADiskThatHangsHoldsNobodyUp) {
  std::filesystem::create_directories(folder_ / "run");
  ASSERT_EQ(mkfifo(path().c_str(), 0600), 0);
  const int reader = open(path().c_str(), O_RDONLY | O_NONBLOCK);  // which never reads
  {
    RunLog file(path());
    for (int64_t i = 0; i < 20'000; ++i) file.append(StepReport{.step = i});
    EXPECT_FALSE(file.flush(std::chrono::milliseconds(1)));
    close(reader);  // the writer's thread ends with an error
  }
}

TEST_F(TheRunLog, AFolderThatCannotBeMadeIsAnError) {
  try {
    RunLog file("/proc/none/metrics.jsonl");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("[metrics] cannot write /proc/none/metrics.jsonl: No such"));
  }
}

TEST_F(TheRunLog, HostileLinesAreSkippedAndCounted) {
  const std::string many(100'000, '[');
  const std::vector<std::string> lines = {
      "null",
      "[]",
      "{}",
      "\"x\"",
      many,
      "{\"type\":5}",
      R"({"type":"step"})",
      R"({"type":"step","step":-1})",
      R"({"type":"step","step":1e400})",
      R"({"type":"step","step":9223372036854775807})",
      R"({"type":"step","step":1,"loss":"nan"})",
      R"({"type":"step","step":1,"ranks":{"step_seconds":[1],"data_seconds":[1,2]}})",
      R"({"type":"step","step":1,"ranks":{"step_seconds":[-1]}})",
      R"({"type":"step","step":1,"ranks":[1]})",
      R"({"type":"run"})",
      R"({"type":"run","version":1,"hosts":3})",
      "\xff\xfe",
      std::string("\0", 1)};
  std::string all = kStart;
  for (const auto& line : lines) all += line + "\n";
  write(all + step_line(5, 1));
  const RunHistory run = read_run(path());
  EXPECT_EQ(run.skipped_lines, static_cast<int64_t>(lines.size()));
  EXPECT_EQ(run.reports, 1);
  EXPECT_EQ(run.loss.points()[0].first, 5);
}

// As programs write them that read numbers as doubles and pass a log on.
TEST_F(TheRunLog, WholeNumbersMayBeWrittenAsDoubles) {
  write(kStart + R"({"type":"step","step":1e2,"samples":64.0,"ranks":{"memory_bytes":[1e8,2.5e8]}})"
                 "\n"
                 R"({"type":"step","step":101,"ranks":{"memory_bytes":[1.5]}})"
                 "\n"
                 R"({"type":"step","step":1e17})"
                 "\n");
  const RunHistory run = read_run(path());
  EXPECT_EQ(run.skipped_lines, 2);
  ASSERT_EQ(run.reports, 1);
  EXPECT_EQ(run.last->step, 100);
  EXPECT_EQ(run.last->ranks.at(1).memory_bytes, 250'000'000);
}

TEST_F(TheRunLog, ALineLongerThanAllowedIsSkipped) {
  write(kStart + "{\"type\":\"" + std::string(RunLogReader::kLongestLine + 300'000, 'x') + "\"}\n" +
        step_line(5, 1));
  const RunHistory run = read_run(path());
  EXPECT_EQ(run.reports, 1);
  EXPECT_EQ(run.first_fault, "line 2: longer than a line may be");
}

TEST_F(TheRunLog, ALogOfALaterVersionIsRefused) {
  write(R"({"type":"run","version":2})"
        "\n");
  try {
    read_run(path());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("is of version 2, this program reads up to 1"));
  }
}

TEST_F(TheRunLog, OneThatCannotBeOpenedIsNotCalledMissing) {
  const std::string loop = folder_ / "loop";
  std::filesystem::create_symlink(loop, loop);
  try {
    read_run(loop);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), "[metrics] " + loop +
                                " cannot be opened: Too many levels of symbolic "
                                "links");
  }
}

TEST_F(TheRunLog, AFolderWithoutALogIsAnErrorThatSaysWhatToName) {
  try {
    read_run(folder_.path());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("there is no log " + folder_ / "metrics.jsonl: name a run's"));
  }
}

TEST_F(TheRunLog, AReaderFollowsAFileThatGrows) {
  RunLog file(path());
  file.append(RunStart{});
  ASSERT_TRUE(file.flush());
  RunLogReader reader(path());
  RunHistory run;
  EXPECT_TRUE(reader.poll(run));
  EXPECT_FALSE(reader.poll(run));
  file.append(StepReport{.step = 1});
  ASSERT_TRUE(file.flush());
  EXPECT_TRUE(reader.poll(run));
  EXPECT_EQ(run.last->step, 1);
}

TEST_F(TheRunLog, ALongRunIsThinnedAndKeepsItsExtremes) {
  RunHistory run;
  run.add(RunStart{.ranks = 2}, 1);
  for (int64_t step = 1; step <= 20'000; ++step) {
    StepReport report{.step = step, .loss = step == 777 ? 99.0 : 1.0};
    report.ranks = {{.step_seconds = 0.01, .memory_bytes = 1000},
                    {.step_seconds = 0.01, .communication_seconds = 0.005, .memory_bytes = step}};
    run.add(report, 1 + static_cast<double>(step));
  }
  EXPECT_LE(run.loss.points().size(), 1024u);
  EXPECT_LE(run.columns.size(), 512u);
  int64_t steps = 0;
  double most = 0;
  for (const auto& point : run.loss.points()) {
    steps += point.count;
    most = std::max(most, point.most);
  }
  EXPECT_EQ(steps, 20'000);
  EXPECT_EQ(most, 99);
  EXPECT_EQ(run.columns.back().memory_bytes[1], 20'000);
  EXPECT_NEAR(run.columns.front().working_seconds[1], 0.005, 1e-6);
  EXPECT_NEAR(run.ranks[1].communication_seconds, 100, 1e-6);
}

TEST_F(TheRunLog, LossesAreMeansOfStepsAndCountAsTheirSamples) {
  RunHistory run;
  run.add(RunStart{}, 1);
  int64_t samples = 0;
  for (int64_t i = 1; i <= 1025; ++i) {  // 512 points at most: the first ones are joined
    samples += i % 2 == 1 ? 64 : 1;
    run.add(
        StepReport{
            .step = i, .loss = 99.0, .mean_loss = i % 2 == 1 ? 20.0 : 7.0, .samples = samples},
        2);
  }
  for (size_t i = 0; i < 100; ++i) {
    EXPECT_DOUBLE_EQ(run.loss.points()[i].mean, (64 * 20.0 + 7.0) / 65);
  }
}

TEST_F(TheRunLog, AReportWithoutRanksLeavesThoseThatWereKnown) {
  RunHistory run;
  run.add(RunStart{.ranks = 2}, 1);
  StepReport report{.step = 10, .steps = 10};
  report.ranks.assign(2, {.step_seconds = 1, .memory_bytes = 1000});
  run.add(report, 2);
  run.add(StepReport{.step = 13, .steps = 3}, 3);  // rank 0's alone
  EXPECT_EQ(run.last->step, 13);
  ASSERT_EQ(run.last->ranks.size(), 2u);
  EXPECT_EQ(run.last->ranks[1].memory_bytes, 1000);
}

TEST_F(TheRunLog, ARestartTakesBackWhatIsMadeAgain) {
  RunHistory run;
  run.add(RunStart{}, 1);
  for (int64_t step = 1; step <= 10; ++step) run.add(StepReport{.step = step, .loss = 1.0}, 2);
  run.add(RunStart{.resumed_at = 6}, 3);
  for (int64_t step = 7; step <= 8; ++step) run.add(StepReport{.step = step, .loss = 2.0}, 4);
  ASSERT_EQ(run.loss.points().size(), 8u);
  EXPECT_EQ(run.loss.points()[5].mean, 1);
  EXPECT_EQ(run.loss.points()[6].mean, 2);
  ASSERT_EQ(run.events.size(), 1u);
  EXPECT_EQ(run.events[0].kind, "restart");
  EXPECT_THAT(run.events[0].text, HasSubstr("from the checkpoint of step 6"));
}

TEST_F(TheRunLog, ARestartTakesBackLossesThatWereNoNumbers) {
  const auto add = [](RunHistory& run, int64_t from, int64_t to, double loss) {
    for (int64_t step = from; step <= to; ++step)
      run.add(StepReport{.step = step, .loss = loss}, 2);
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t steps : {10, 5000}) {  // of as many some points stand for several reports
    RunHistory run;
    run.add(RunStart{}, 1);
    add(run, 1, steps, 1.0);
    add(run, steps + 1, steps + 3, kNan);
    run.add(RunStart{.resumed_at = steps + 2}, 3);
    EXPECT_EQ(run.loss.not_finite(), 2);
    EXPECT_EQ(run.loss.first_not_finite(), steps + 1);
    run.add(RunStart{.resumed_at = steps}, 4);
    EXPECT_EQ(run.loss.not_finite(), 0);
    add(run, steps + 1, steps + 20, 0.5);
    EXPECT_NE(findings_of(run)[1].title, "The loss is not a number");
    add(run, steps + 21, steps + 4020, kNan);
    EXPECT_EQ(run.loss.first_not_finite(), steps + 21);
    EXPECT_EQ(run.loss.not_finite(), 4000);
    run.add(RunStart{}, 5);
    EXPECT_EQ(run.loss.not_finite(), 0);
  }
}

TEST_F(TheRunLog, RanksThatChangeInNumberKeepTheHistoryBounded) {
  RunHistory run;
  for (int64_t step = 1; step <= 5000; ++step) {
    StepReport report{.step = step};
    report.ranks.resize(1 + static_cast<size_t>(step % 3), {.step_seconds = 1});
    run.add(report, 1);
  }
  EXPECT_LE(run.columns.size(), 600u);
  EXPECT_EQ(run.ranks.size(), 3u);
}

}  // namespace
}  // namespace lockstep::train

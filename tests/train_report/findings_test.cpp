// What the summary says of a run, and that the rest of the page says the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/train/progress_line.h"
#include "lockstep/train/run_report.h"
#include "lockstep/train/run_warnings.h"

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// In the page's data.
nlohmann::json first_run_in(const std::string& page) {
  const std::string before = R"(id="data">)";
  const size_t begin = page.find(before) + before.size();
  const size_t end = page.find("</script>", begin);
  return nlohmann::json::parse(page.substr(begin, end - begin))["runs"][0];
}

// Many short steps of computing, and a last report of few long ones of communication.
TEST(Findings, TheChartOfSharesHasTheFiguresOfTheSummary) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1e9);
  for (int64_t i = 1; i <= 4; ++i) {
    StepReport report{.step = 100 * i, .steps = i < 4 ? 10 : 100, .loss = 1.0};
    report.ranks.assign(1, {.step_seconds = 0.010, .communication_seconds = 0.001});
    if (i == 4) report.ranks[0] = {.step_seconds = 0.020, .communication_seconds = 0.014};
    run.add(report, 1e9 + static_cast<double>(i));
  }
  // Of 2.3 s 1.43 are communication, and of the four reports the mean is 0.25.
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("38\u00a0% computing, 62\u00a0% communication"));
  EXPECT_THAT(first_run_in(page)["total_shares"], ElementsAre("0 %", "0 %", "62 %", "38 %"));
  EXPECT_THAT(page, HasSubstr("${name} ${run.total_shares[k]}"));
  EXPECT_THAT(page, HasSubstr(R"(["saving", "data", "communication", "computing"])"));
}

// "peak memory by rank: 379.7 MB" is what the run itself prints.
TEST(Findings, MemoryHasTheUnitsOfTheTerminal) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1e9);
  StepReport report{.step = 10, .loss = 1.0};
  report.ranks.assign(1, {.step_seconds = 0.010, .memory_bytes = 379'700'000});
  run.add(report, 1e9 + 1);
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("At most 379.7\u00a0MB on rank 0."));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">379.7 MB</td>"));
  EXPECT_THAT(page, Not(HasSubstr("MiB")));
  EXPECT_THAT(run_screen(run, {.width = 80}), HasSubstr(" 379.7 MB "));
  report.ranks[0].memory_bytes = 3'240'000'000;
  run.add(report, 1e9 + 2);
  EXPECT_THAT(run_screen(run, {.width = 80}), HasSubstr(" 3.2 GB "));
}

std::vector<std::string> titles_of(const RunHistory& run) {
  std::vector<std::string> all;
  for (const Finding& finding : findings_of(run)) all.push_back(finding.title);
  return all;
}

TEST(Findings, OfRanksThatDifferByLessThanTwoMillisecondsNoneIsBlamed) {
  const auto run_of = [](double seconds, double longer) {
    RunHistory run;
    run.add(RunStart{.ranks = 2}, 1e9);
    StepReport report{.step = 10, .steps = 10, .loss = 1.0};
    report.ranks.assign(2, {.step_seconds = seconds});
    report.ranks[1].step_seconds += longer;
    run.add(report, 1e9 + 1);
    return run;
  };
  EXPECT_THAT(titles_of(run_of(0.0012, 0.0005)), Contains("All ranks work about equally long"));
  EXPECT_THAT(titles_of(run_of(0.0012, 0.003)),
              Contains("Rank 1 works longest, and all wait for it"));
  RunHistory run = run_of(0.05, 0);
  run.add(Event{.kind = "warning",
                .step = 10,
                .rank = 1,
                .text = "rank 1 works 90.0 ms a step, the others 50.0 ms (1.80 times): it computes "
                        "for longer, and all wait for it"},
          1e9 + 2);
  EXPECT_THAT(titles_of(run), Contains("On the mean of the run all ranks work about equally long"));
}

TEST(Findings, TheScreenWritesAllStepsAlike) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1);
  StepReport report{.step = 3878, .loss = std::nan("")};
  for (const Event& event : RunWarnings().look(report)) run.add(event, 2);
  EXPECT_THAT(run_screen(run, {.width = 200}),
              HasSubstr("last warning (step 3,878): the loss is NaN at step 3,878"));
  run.add(RunStart{.ranks = 1, .resumed_at = 3878, .restart = 1}, 3);
  EXPECT_THAT(run_screen(run, {.width = 200}),
              AllOf(HasSubstr("(step 3,878): "), HasSubstr("the checkpoint of step 3,878"),
                    Not(HasSubstr("3878"))));
}

// By default `lockstep train FILE` does not resume.
TEST(Findings, APreemptedRunSaysHowItGoesOn) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1e9);
  run.add(StepReport{.step = 10, .loss = 1.0}, 1e9 + 5);
  run.add(RunEnd{.step = 10, .outcome = "preempted"}, 1e9 + 10);
  EXPECT_EQ(
      findings_of(run)[0].text,
      "After 10 steps in 10 s. Started again with checkpoint.resume: latest (Saving::resume in "
      "C++, --resume for reinforcement learning), it goes on from its last checkpoint.");
}

// A run that each start of `starts` goes on with, and that has finished.
RunHistory continued(const std::vector<RunStart>& starts) {
  RunHistory run;
  double now = 1e9;
  run.add(RunStart{.ranks = 1}, now);
  for (const RunStart& start : starts) {
    run.add(StepReport{.step = start.resumed_at, .loss = 1.0}, now += 5);
    run.add(start, now);
  }
  run.add(RunEnd{.step = 4000, .outcome = "finished"}, now += 5);
  return run;
}

TEST(Findings, ARunThatWasResumedByHandWasNotRestarted) {
  const RunHistory run = continued({{.resumed_at = 2000}});
  const Finding finding = findings_of(run)[0];
  EXPECT_EQ(finding.title, "The run finished");
  EXPECT_EQ(finding.tone, Finding::Tone::Good);
  EXPECT_THAT(finding.text, HasSubstr(" It was resumed once."));
  EXPECT_EQ(run.events[0].text, "resumed from the checkpoint of step 2,000");
  EXPECT_THAT(run_screen(run, {.width = 200}),
              HasSubstr("last start (step 2,000): resumed from the checkpoint of step 2,000"));
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("<td>start</td><td></td><td>resumed from the checkpoint of step"));
  EXPECT_EQ(first_run_in(page)["marks"][0]["text"], "resumed from the checkpoint of step 2,000");
}

TEST(Findings, ARunThatWasPreemptedIsSaidToBeOnTheScreenToo) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1e9);
  run.add(StepReport{.step = 1, .loss = 1.0}, 1e9 + 1);
  EXPECT_THAT(findings_of(run)[0].text, HasSubstr("It has come to 1 step in "));
  EXPECT_THAT(report_page({run}), HasSubstr("1 rank, 1 step, started"));
  run.add(RunEnd{.step = 1, .outcome = "preempted"}, 1e9 + 2);
  EXPECT_THAT(run_screen(run, {.width = 200}), HasSubstr("  ended: preempted\n"));
  run.add(RunEnd{.step = 1, .outcome = "finished"}, 1e9 + 2);
  EXPECT_THAT(run_screen(run, {.width = 200}), HasSubstr("  ended\n"));
}

TEST(Findings, ARunThatWasRestartedAndResumedSaysBoth) {
  const RunHistory run = continued({{.resumed_at = 1000, .restart = 1},
                                    {.resumed_at = 2000},
                                    {.resumed_at = 3000, .restart = 1}});
  const Finding finding = findings_of(run)[0];
  EXPECT_EQ(finding.title, "The run finished after a restart");
  EXPECT_EQ(finding.tone, Finding::Tone::Plain);
  EXPECT_THAT(finding.text, HasSubstr(" It was restarted 2 times and resumed once."));
  EXPECT_EQ(run.events[0].text, "started again from the checkpoint of step 1,000");
  EXPECT_EQ(run.events[1].text, "resumed from the checkpoint of step 2,000");
}

// After a checkpoint without it, and before the next one: it is made again.
TEST(Findings, AnEvaluationThatWasMadeTwiceCountsOnce) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1e9);
  run.add(EvaluationReport{.step = 50, .metrics = {{"loss", 0.7}}}, 1e9);
  for (const double loss : {0.4, 0.3}) {
    run.add(RunStart{.ranks = 1, .resumed_at = 100}, 1e9);
    run.add(EvaluationReport{.step = 100, .metrics = {{"loss", loss}, {"accuracy", 0.5}}}, 1e9);
  }
  const auto& points = run.evaluations.at("loss").points();
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[1].mean, 0.3);
  EXPECT_EQ(run.evaluations.at("accuracy").points().size(), 1u);
}

// A training whose loss falls from report to report, with evaluations after them.
RunHistory evaluated(const std::vector<double>& losses) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1e9);
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto step = static_cast<int64_t>(1000 * (i + 1));
    run.add(StepReport{.step = step, .steps = 1000, .loss = 2.0 / static_cast<double>(i + 1)}, 1e9);
    run.add(EvaluationReport{.step = step, .metrics = {{"loss", losses[i]}, {"accuracy", 0.5}}},
            1e9);
  }
  return run;
}
bool rises(const std::vector<double>& losses) {
  return std::ranges::any_of(findings_of(evaluated(losses)), [](const Finding& one) {
    return one.title == "The evaluation's loss rises";
  });
}

TEST(Findings, AnEvaluationWhoseLossRisesIsSeen) {
  RunHistory run = evaluated({2.1, 0.8, 0.341, 0.41, 0.63, 0.9, 1.121});
  EXPECT_EQ(findings_of(run)[1].title, "The training loss fell");
  const Finding finding = findings_of(run)[2];
  EXPECT_EQ(finding.title, "The evaluation's loss rises");
  EXPECT_EQ(finding.tone, Finding::Tone::Bad);
  EXPECT_EQ(finding.text,
            "It was best (0.341) at step 3,000 and is 1.121 now: the model overfits. See "
            "training.early_stopping and checkpoint.restore_best.");
  run.add(RunEnd{.step = 7000, .outcome = "early stopping"}, 1e9);
  EXPECT_THAT(findings_of(run)[2].text, HasSubstr("overfits. See checkpoint.restore_best."));
  run.starts[0].config["checkpoint.restore_best"] = "true";
  EXPECT_EQ(findings_of(run)[2].tone, Finding::Tone::Plain);
  EXPECT_THAT(findings_of(run)[2].text,
              HasSubstr("overfits. checkpoint.restore_best takes the best checkpoint at the end."));
}

TEST(Findings, WhereTrainingGotWorseTooTheModelDoesNotOverfit) {
  RunHistory run = evaluated({2.1, 0.8, 0.341, 0.41});
  for (int64_t step = 5000; step <= 9000; step += 1000) {
    run.add(StepReport{.step = step, .steps = 1000, .loss = 1.5}, 1e9);
    run.add(EvaluationReport{.step = step, .metrics = {{"loss", 1.4}}}, 1e9);
  }
  EXPECT_EQ(findings_of(run)[2].text,
            "It was best (0.341) at step 3,000 and is 1.4 now. See "
            "training.early_stopping and checkpoint.restore_best.");
}

TEST(Findings, WhatIsNoRiseOfEvaluationsIsNotSaid) {
  EXPECT_FALSE(rises({}));
  EXPECT_FALSE(rises({1.0}));
  EXPECT_FALSE(rises({2.0, 0.5, 0.9, 1.0})) << "two evaluations after the best";
  EXPECT_TRUE(rises({2.0, 0.5, 0.7, 0.9, 1.0}));
  EXPECT_FALSE(rises({2.0, 1.0, 0.6, 0.5, 0.51, 0.52, 0.53})) << "6 %";
  EXPECT_FALSE(rises({2.0, 0.5, 0.9, 0.6, 0.95, 0.55, 0.9, 0.6, 0.8})) << "noise";
  EXPECT_FALSE(rises({2.3, 0.1, 0.0001, 0.0002, 0.0003, 0.0004})) << "of what was learned nothing";
  EXPECT_FALSE(rises({2.0, 0.5, 0.7, 0.9, std::nan("")}));
  EXPECT_FALSE(rises({2.0, 0.5, 0.7, 0.9, 0.52})) << "it is as good as the best now";
  EXPECT_TRUE(rises({-1.0, -3.0, -2.5, -2.0, -1.5})) << "a likelihood of densities";
  // A stage has data of its own.
  RunHistory run = evaluated({2.0, 0.5, 0.7, 0.9, 1.0});
  run.add(Event{.kind = "stage", .step = 2500, .text = "b"}, 1e9);
  EXPECT_EQ(findings_of(run).size(), 2u);
}

}  // namespace
}  // namespace lockstep::train

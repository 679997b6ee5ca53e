// The page in words and tables, and what is in its data.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/train/run_report.h"
#include "train/report/page/transfer.h"

namespace lockstep::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMiB = int64_t{1} << 20;

// A run of `ranks` ranks that learns, and whose reports `change` changes.
template <class Change>
RunHistory made(int ranks, int64_t reports, const Change& change) {
  RunHistory run;
  run.path = "runs/a/metrics.jsonl";
  run.add(RunStart{.ranks = ranks, .name = "net", .config = {{"training.seed", "3"}}}, 1e9);
  for (int64_t i = 1; i <= reports; ++i) {
    StepReport report{.step = 10 * i,
                      .steps = 10,
                      .loss = 2.0 / static_cast<double>(i),
                      .learning_rate = 0.1,
                      .gradient_norm = 1.0,
                      .samples_per_second = 1000};
    report.ranks.assign(
        static_cast<size_t>(ranks),
        {.step_seconds = 0.010, .communication_seconds = 0.001, .memory_bytes = 500 * kMiB});
    change(report, i);
    run.add(report, 1e9 + static_cast<double>(i));
  }
  run.add(RunEnd{.step = 10 * reports, .outcome = "finished"}, 1e9 + 100);
  return run;
}
RunHistory good(int ranks = 4) {
  return made(ranks, 40, [](StepReport&, int64_t) {});
}

std::vector<std::string> bad_titles(const RunHistory& run) {
  std::vector<std::string> all;
  for (const Finding& finding : findings_of(run)) {
    if (finding.tone == Finding::Tone::Bad) all.push_back(finding.title);
  }
  return all;
}

nlohmann::json data_of(const std::string& page) {
  const std::string before = R"(id="data">)";
  const size_t begin = page.find(before) + before.size();
  return nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST(Page, OfAGoodRunNothingIsBad) {
  EXPECT_TRUE(bad_titles(good()).empty());
  EXPECT_EQ(findings_of(good())[0].title, "The run finished");
  EXPECT_EQ(findings_of(good())[1].title, "The training loss fell");
}

TEST(Page, AStragglerIsSeen) {
  const RunHistory run = made(4, 40, [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank = {.step_seconds = 0.015, .communication_seconds = 0.005};
    report.ranks[2].communication_seconds = 0;
  });
  EXPECT_THAT(bad_titles(run), testing::ElementsAre("Rank 2 works longest, and all wait for it"));
  const std::string page = report_page({run});
  EXPECT_THAT(page,
              HasSubstr("<tr class=\"bad\"><th scope=\"row\">rank 2</th><td class=\"n\">15 ms</td>"
                        "<td class=\"n\">1.50</td>"));
  EXPECT_LT(page.find("<th scope=\"row\">rank 2<"), page.find("<th scope=\"row\">rank 0<"))
      << "the table begins with what one looks for";
  const auto heat = data_of(page)["runs"][0]["heat"];
  EXPECT_NEAR(heat["cells"][0][2].get<double>() / heat["cells"][0][0].get<double>(), 1.5, 1e-3);
  EXPECT_THAT(heat["says"], HasSubstr("The slowest is rank 2, with 1.50 times the median"));
}

TEST(Page, AStarvingLoaderIsSeen) {
  const RunHistory run = made(2, 20, [](StepReport& report, int64_t) {
    for (auto& rank : report.ranks) rank.data_seconds = 0.004;
  });
  EXPECT_THAT(bad_titles(run), testing::ElementsAre("Training waits for data"));
  EXPECT_NEAR(data_of(report_page({run}))["runs"][0]["shares"][0][2][1].get<double>(), 0.4, 1e-3);
}

TEST(Page, ALeakingRankIsSeen) {
  const RunHistory run = made(
      3, 20, [](StepReport& report, int64_t i) { report.ranks[1].memory_bytes += 20 * i * kMiB; });
  EXPECT_THAT(bad_titles(run), testing::ElementsAre("Rank 1's memory grew"));
}

TEST(Page, GpusThatAreIdleAreSeenWhereTheyWereMeasured) {
  const std::string without = report_page({good()});
  EXPECT_THAT(without, Not(HasSubstr("GPU in use")));
  EXPECT_THAT(without, Not(HasSubstr("data-chart=\"gpu_busy\"")));
  const RunHistory run = made(3, 600, [](StepReport& report, int64_t) {
    report.ranks[0].gpu_busy = 0.9;
    report.ranks[1].gpu_busy = 0.1;
  });
  EXPECT_TRUE(bad_titles(run).empty());
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("data-chart=\"gpu_busy\""));
  EXPECT_THAT(page, HasSubstr("They compute 50\u00a0% of the time"));
  EXPECT_THAT(page, HasSubstr("GPU in use"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">90 %</td></tr>"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">—</td></tr>")) << "rank 2 has none";
  const auto busy = data_of(page)["runs"][0]["gpu_busy"];
  ASSERT_GT(busy.size(), 100u);
  EXPECT_NEAR(busy[0][0].get<double>(), 0.9, 1e-4);
  EXPECT_NEAR(busy.back()[1].get<double>(), 0.1, 1e-4);
  EXPECT_TRUE(busy[0][2].is_null());
  const RunHistory idle =
      made(1, 4, [](StepReport& report, int64_t) { report.ranks[0].gpu_busy = 0.2; });
  EXPECT_THAT(bad_titles(idle), testing::ElementsAre("GPUs are idle most of the time"));
}

TEST(Page, StagesAreMarkedWithTheirNames) {
  RunHistory run = good();
  run.add(Event{.kind = "stage", .step = 100, .text = "all"}, 1e9);
  run.add(Event{.kind = "save", .step = 150}, 1e9);
  const auto marks = data_of(report_page({run}))["runs"][0]["marks"];
  ASSERT_EQ(marks.size(), 1u) << "a save is not a mark";
  EXPECT_EQ(marks[0]["kind"], "stage");
  EXPECT_EQ(marks[0]["text"], "all");
}

TEST(Page, AnExplodingLossAndANaNAreSeen) {
  const auto exploding = made(1, 20, [](StepReport& report, int64_t i) {
    if (i > 15) report.loss = 40.0;
  });
  EXPECT_THAT(bad_titles(exploding), testing::ElementsAre("The loss has exploded"));
  const auto broken = made(1, 20, [](StepReport& report, int64_t i) {
    if (i > 15) report.loss = std::nan("");
  });
  EXPECT_THAT(bad_titles(broken), testing::ElementsAre("The loss is not a number"));
  EXPECT_TRUE(data_of(report_page({broken}))["runs"][0]["series"]["loss"][19][2].is_null());
}

TEST(Page, TheLossIsTheMeanOfTheStepsNotThatOfTheirLastBatch) {
  // Of each two steps the second has one sample, and nothing is learned.
  const auto frozen = made(1, 9, [](StepReport& report, int64_t i) {
    report.loss = 20.0 / static_cast<double>(i);
    report.mean_loss = 15.0;
  });
  EXPECT_EQ(findings_of(frozen)[1].title, "The loss did not fall");
  EXPECT_EQ(data_of(report_page({frozen}))["runs"][0]["series"]["loss"][8][2], 15.0);
  EXPECT_THAT(report_page({frozen, frozen}), HasSubstr("<td class=\"n\">15</td>"));
}

TEST(Page, WhatRoundingLeavesIsNoFall) {
  const auto frozen = made(1, 9, [](StepReport& report, int64_t i) {
    report.loss = 15.0 * (1 - 1e-9 * static_cast<double>(i));
  });
  EXPECT_EQ(findings_of(frozen)[1].title, "The loss did not fall");
}

TEST(Page, TheLuckOfSingleBatchesIsNoLossOfWhatWasLearned) {
  const auto lucky = [](int64_t i) {
    return made(1, 200, [i](StepReport& report, int64_t at) {
      report.loss = 0.5 + 1.5 / static_cast<double>(at) + (at % 2 == 0 ? 0.1 : -0.1);
      if (at == i) report.loss = 0.01;
    });
  };
  EXPECT_EQ(findings_of(lucky(120))[1].title, "The training loss fell");
  // What was really forgotten is told all the same.
  const auto forgotten = made(1, 200, [](StepReport& report, int64_t at) {
    report.loss = at < 120 ? 2.0 / static_cast<double>(at) : 1.0;
  });
  EXPECT_EQ(findings_of(forgotten)[1].title, "The training loss fell, and rose again in part");
}

TEST(Page, ALastReportOfAFewStepsIsPartOfTheOneBefore) {
  auto run = made(1, 8, [](StepReport&, int64_t) {});
  run.add(StepReport{.step = 81, .steps = 1, .loss = 1.9}, 1e9 + 50);
  const Finding finding = findings_of(run)[1];
  EXPECT_EQ(finding.title, "The training loss fell");
  // (10 * 0.25 + 1.9) / 11
  EXPECT_THAT(finding.text, HasSubstr("The loss went from 2 to 0.4; the best was 0.2857"));
}

TEST(Page, ARunOfOneReportHasALoss) {
  const auto run = made(1, 1, [](StepReport&, int64_t) {});
  EXPECT_EQ(findings_of(run)[1].title, "Too few reports to see whether it learns");
  EXPECT_EQ(findings_of(run)[1].text, "The loss was 2, the mean up to step 10.");
}

TEST(Page, ALossAroundZeroIsNotBad) {
  const std::vector<double> losses{0, 0, 0.01, -0.02, 0.03};
  const auto run = made(1, 5, [&](StepReport& report, int64_t i) {
    report.loss = losses[static_cast<size_t>(i - 1)];
  });
  EXPECT_TRUE(bad_titles(run).empty());
  EXPECT_EQ(findings_of(run)[1].title, "The loss moves around zero");
}

TEST(Page, ASmallLossThatExplodesIsSeen) {
  const auto run = made(1, 20, [](StepReport& report, int64_t i) {
    report.loss = i <= 15 ? 0.001 + 0.00001 * static_cast<double>(i % 3) : 0.25;
  });
  EXPECT_THAT(bad_titles(run), testing::ElementsAre("The loss has exploded"));
}

TEST(Page, ARestartIsSeen) {
  RunHistory run = good();
  run.add(RunStart{.ranks = 4, .resumed_at = 200, .restart = 1}, 1e9 + 200);
  run.add(StepReport{.step = 210, .loss = 0.1}, 1e9 + 201);
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("It was restarted once."));
  EXPECT_THAT(page, HasSubstr("started again from the checkpoint of step 200"));
  EXPECT_EQ(data_of(page)["runs"][0]["marks"][0]["kind"], "restart");
}

// On two ranks in place of four each has twice the work and, where the model is divided, the
// memory.
TEST(Page, RanksThatWentOnWithoutOthersAreNeitherSlowNorLeak) {
  RunHistory run = good(4);
  run.add(RunStart{.ranks = 2, .resumed_at = 400}, 1e9 + 200);
  for (int64_t i = 1; i <= 40; ++i) {
    StepReport report{.step = 400 + 10 * i, .steps = 10, .loss = 0.04};
    report.ranks.assign(
        2, {.step_seconds = 0.020, .communication_seconds = 0.002, .memory_bytes = 1000 * kMiB});
    run.add(report, 1e9 + 200 + static_cast<double>(i));
  }
  EXPECT_TRUE(bad_titles(run).empty()) << testing::PrintToString(bad_titles(run));
  EXPECT_EQ(run.ranks.size(), 2);
  // What the others did is in the map all the same.
  const auto heat = data_of(report_page({run}))["runs"][0]["heat"];
  EXPECT_EQ(heat["rows"].size(), 4);
  EXPECT_EQ(heat["cells"].front().size(), 4);
  EXPECT_EQ(heat["cells"].back().size(), 2);
}

// The log continues in one file; the time between the two processes is not counted.
TEST(Page, ARunThatWasResumedLaterDidNotTakeTheTimeBetween) {
  RunHistory run;
  run.add(RunStart{.ranks = 1}, 1e9);
  run.add(StepReport{.step = 10, .loss = 2.0}, 1e9 + 20);
  run.add(RunEnd{.step = 10, .outcome = "preempted"}, 1e9 + 21);
  run.add(RunStart{.ranks = 1, .resumed_at = 10}, 1e9 + 7221);
  run.add(StepReport{.step = 20, .loss = 1.0}, 1e9 + 7240);
  run.add(RunEnd{.step = 20, .outcome = "finished"}, 1e9 + 7241);
  EXPECT_EQ(run.working_seconds(), 41);
  EXPECT_THAT(findings_of(run)[0].text,
              AllOf(HasSubstr("20 steps in 41 s"), HasSubstr("Nothing ran for 2 h")));
}

TEST(Page, AnotherRunInTheSameFileIsNoRestart) {
  RunHistory run = good();
  const auto steps = run.loss.points().size();
  run.add(RunStart{.ranks = 1}, 1e9 + 5000);
  for (int64_t step = 1; step <= 3; ++step) {
    run.add(StepReport{.step = step, .loss = 1.0}, 1e9 + 5000 + static_cast<double>(step));
  }
  EXPECT_GT(steps, 3u);
  EXPECT_EQ(run.loss.points().size(), 3u);
  EXPECT_EQ(run.starts.size(), 1u);
  EXPECT_EQ(run.working_seconds(), 3);
  EXPECT_THAT(findings_of(run)[0].text,
              AllOf(HasSubstr("3 steps in 3.0 s."), HasSubstr("The log has 1 earlier run"),
                    Not(HasSubstr("restarted"))));
  // A launcher's restart without a checkpoint is the same run.
  run.add(RunStart{.ranks = 1, .restart = 1}, 1e9 + 5010);
  EXPECT_EQ(run.starts.size(), 2u);
}

TEST(Page, RunsOfOneNameAreToldApartByTheirFolders) {
  std::vector<RunHistory> runs(3, good());
  runs[0].path = "a/run/metrics.jsonl";
  runs[1].path = "b/run/metrics.jsonl";
  runs[2].path = "/x/b/other/metrics.jsonl";
  const auto data = data_of(report_page(runs));
  EXPECT_EQ(data["runs"][0]["label"], "a/run");
  EXPECT_EQ(data["runs"][1]["label"], "b/run");
  EXPECT_EQ(data["runs"][2]["label"], "other");
  runs[1].path = runs[0].path;  // the same one twice
  EXPECT_EQ(data_of(report_page(runs))["runs"][1]["label"], "a/run");
}

TEST(Page, ARunThatFailedOrHasNoEndSaysSo) {
  RunHistory run = good();
  run.add(RunEnd{.step = 400, .outcome = "rank 1 was killed", .failed = true}, 1e9 + 200);
  EXPECT_THAT(findings_of(run)[0].text, HasSubstr("rank 1 was killed"));
  run.add(RunStart{.ranks = 4, .resumed_at = 400}, 1e9 + 201);
  EXPECT_EQ(findings_of(run)[0].title, "Still running, or killed");
}

TEST(Page, SaysWhyARunEnded) {
  for (const auto& [outcome, title] :
       std::map<std::string, std::string>{{"finished", "The run finished"},
                                          {"preempted", "The run was preempted"},
                                          {"stopped", "The program stopped the run"},
                                          {"time limit", "The run came to its time limit"},
                                          {"early stopping", "The run stopped early"}}) {
    RunHistory run = good();
    run.end->outcome = outcome;
    EXPECT_EQ(findings_of(run)[0].title, title);
  }
  RunHistory none;
  none.add(RunStart{.ranks = 2}, 1e9);
  none.add(RunEnd{.outcome = "finished"}, 1e9);
  EXPECT_EQ(findings_of(none)[0].title, "The run made no step");
}

TEST(Page, OfOneRankThereIsNoMapOfRanks) {
  EXPECT_THAT(report_page({good(1)}), Not(HasSubstr("data-chart=\"heat\"")));
  EXPECT_THAT(report_page({good(2)}), HasSubstr("data-chart=\"heat\""));
}

TEST(Page, BeforeTheFirstReportItSaysSoAndHowManyRanksThereAre) {
  RunHistory run;
  run.add(RunStart{.ranks = 4, .name = "net"}, 1e9);
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("net: 4 ranks, 0 steps"));
  EXPECT_THAT(page, HasSubstr("There is no report yet."));
}

TEST(Page, LinksATraceAsAnAddress) {
  const std::string page = report_page({good()}, {.trace = "a b/\"#?<%.json"});
  EXPECT_THAT(page, HasSubstr("<a href=\"a%20b/%22%23%3F%3C%25.json\">a b/&quot;#?&lt;%.json</a>"));
  EXPECT_THAT(report_page({good()}), Not(HasSubstr("Perfetto")));
}

TEST(Page, ANameOfAValueIsTheSameInTheDataAndInTheChart) {
  const std::string name = std::string("\0\x1b[2J \xE2\x80\xAE", 9) + "x\xC2\x9B";
  const RunHistory run = made(1, 3, [&](StepReport& report, int64_t) { report.values[name] = 1; });
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("data-chart=\"value:   [2J    x  \""));
  EXPECT_TRUE(data_of(page)["runs"][0]["series"].contains("value:   [2J    x  "));
}

TEST(Page, ALongWarningIsShortenedInTheSummary) {
  RunHistory run = good();
  const std::string letters = [] {
    std::string all;
    for (int i = 0; i < 1000; ++i) all += "ä";
    return all;
  }();
  run.add(Event{.kind = "warning", .text = "x" + letters}, 1e9);
  const std::string text = findings_of(run).back().text;
  EXPECT_LT(text.size(), 400u);
  EXPECT_TRUE(text.ends_with("ä…")) << text;
}

TEST(Page, WhatIsInALogIsTextNeverMarkup) {
  RunHistory run = good();
  const std::string plain = "</script><script>alert('1')</script><!--\"'& ";
  const std::string evil = "</script><script>alert('1')</script><!--\"'&\x01";
  run.path = "runs/" + evil + "/metrics.jsonl";
  run.add(RunStart{.name = evil,
                   .resumed_at = 400,
                   .config = {{evil, evil}},
                   .environment = {{evil, evil}},
                   .hosts = {evil, "b"}},
          2e9);
  run.add(Event{.kind = evil, .rank = 0, .text = evil, .advice = evil}, 2e9);
  run.add(EvaluationReport{.step = 410, .metrics = {{evil, 1}}}, 2e9);
  StepReport report{.step = 410, .values = {{evil, 1}}};
  run.add(report, 2e9);
  run.add(RunEnd{.outcome = evil, .failed = true}, 2e9);
  const std::string page = report_page({run, run});
  size_t scripts = 0;
  for (size_t at = 0; (at = page.find("<script", at)) != std::string::npos; ++at) ++scripts;
  EXPECT_EQ(scripts, 2u) << "the data, and the program";
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_EQ(page.find("<!--"), std::string::npos);
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(&#39;1&#39;)"));
  EXPECT_TRUE(data_of(page)["runs"][0]["series"].contains("evaluation: " + plain));
}

TEST(Page, NeedsNoNetwork) {
  const std::string page = report_page({good()});
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  for (const char* const outside : {"http:", "src=\"", "@import", "fetch(", "url("}) {
    size_t found = page.find(outside);
    if (std::string(outside) == "http:")
      found = page.find(outside, page.find("www.w3.org/2000/svg") + 1);
    EXPECT_EQ(found, std::string::npos) << outside;
  }
}

TEST(Page, ComparedRunsAreBesideEachOtherWithTheirDifferences) {
  RunHistory other = good();
  other.path = "runs/b";
  other.starts[0].config["training.seed"] = "4";
  other.starts[0].config["optimizer.kind"] = "sgd";
  const std::string page = report_page({good(), other});
  EXPECT_THAT(page, HasSubstr("<tr class=\"differs\"><th "
                              "scope=\"row\">training.<wbr>seed</th><td>3</td><td>4</td></tr>"));
  EXPECT_THAT(page, HasSubstr("<tr class=\"differs\"><th "
                              "scope=\"row\">optimizer.<wbr>kind</th><td>—</td><td>sgd</td></tr>"));
  EXPECT_THAT(page, HasSubstr("2 of 2 differ"));
  EXPECT_EQ(data_of(page)["runs"][1]["label"], "b");
}

TEST(Page, IsSmallForALongRunOnManyRanks) {
  // As of 100,000 steps: the series are as long as they become.
  const auto long_run = made(64, 6000, [](StepReport& report, int64_t i) {
    report.loss = 1 + 1e-4 * std::sin(static_cast<double>(i));
    report.gradient_norm = std::cos(static_cast<double>(i));
    for (size_t r = 0; r < report.ranks.size(); ++r) {
      report.ranks[r].step_seconds +=
          1e-5 * static_cast<double>((i * 31 + static_cast<int64_t>(r)) % 97);
    }
  });
  EXPECT_LE(report_page({long_run}).size(), 2'000'000u);
  const auto wide = made(3000, 80, [](StepReport&, int64_t) {});
  const std::string page = report_page({wide});
  EXPECT_LE(page.size(), 2'000'000u);
  EXPECT_THAT(page, HasSubstr("The 256 slowest of 3000 ranks."));
}

TEST(Page, ALogWithNothingButABeginningMakesAPage) {
  RunHistory run;
  run.add(RunStart{}, 1);
  EXPECT_THAT(report_page({run}), HasSubstr("The log has no figures of ranks."));
  EXPECT_THROW(report_page({}), ConfigError);
}

TEST(Page, HasTheMatrixOfARunOverDomains) {
  RunHistory run = good();
  EXPECT_THAT(report_page({run}), Not(HasSubstr("what was forgotten")));
  run.transfer = transfer_of(R"({"matrix": {"columns": ["airline", "<b>"], "acc": 0.45, "bwt": null,
    "acc_ci95": [0.4, 0.5], "R": [[0.1, 0.2], [0.75, 0.2], [0.5, 0.4]],
    "R_ci95": [[[0, 1], [0, 1]], [[0.7, 0.8], [0, 1]], [[0, 1], [0, 1]]]}})");
  ASSERT_TRUE(run.transfer);
  const std::string page = report_page({run});
  EXPECT_THAT(page, HasSubstr("<strong>0.750</strong><br><span class=\"muted\">0.70 to 0.80"));
  EXPECT_THAT(page, HasSubstr("stage &lt;b&gt;"));
  EXPECT_THAT(page, HasSubstr("average accuracy 0.450 (0.40 to 0.50)."));
  for (const char* other : {"", "[]", "{}", R"({"matrix": {"columns": ["a"], "R": [[1]]}})",
                            R"({"matrix": {"columns": [1], "R": [[1], [1]]}})",
                            R"({"matrix": {"columns": ["a"], "R": [["x"], [1]]}})"}) {
    EXPECT_FALSE(transfer_of(other)) << other;
  }
}

}  // namespace
}  // namespace lockstep::train

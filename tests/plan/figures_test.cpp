// Figures of `lockstep plan` and `simulate` that have to agree with each other.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "support/folder.h"
#include "support/tool.h"

namespace lockstep::plan {
namespace {

using test::lockstep_tool;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class PlanFigures : public testing::Test {
 protected:
  PlanFigures() {
    std::ofstream(run_) << "model: {kind: mlp, hidden: [256]}\ndata: fashion-mnist\n";
  }

  const test::Folder folder_;
  const std::string run_ = folder_ / "run.yaml";
};

// 70,000 images of 28 x 28 bytes, with their labels.
TEST_F(PlanFigures, ADataSetInMemoryIsCountedWhereItsSizeIsKnown) {
  const auto data = [&](const std::string& more) {
    const auto out = lockstep_tool("plan " + run_ + " --json --ranks 2 " + more);
    return nlohmann::json::parse(out.said)["strategies"][0]["memory_bytes"]["data"].get<double>();
  };
  constexpr double kImages = 70000 * 785;
  EXPECT_GT(data(""), kImages);
  EXPECT_LT(data(""), kImages + (1 << 20));
  EXPECT_LT(data("--device h100-sxm"), 1 << 20) << "it is in the host's memory";
}

// Its own rates say the same.
TEST_F(PlanFigures, SaysHowManyTimesOneRankManyAre) {
  const std::string what = "plan --model qwen3-0.6b --bf16 --device h100-sxm --network 8x400g ";
  const auto plan = nlohmann::json::parse(lockstep_tool(what + "--ranks 16 --json").said);
  const auto& sizes = plan.at("sizes");
  const double alone = sizes[0].at("samples_per_second"), best = plan["best"]["samples_per_second"];
  EXPECT_NEAR(plan["best"]["efficiency"].get<double>(), best / (16 * alone), 1e-6);
  EXPECT_NEAR(best / alone, 15.5, 0.1);
  EXPECT_EQ(sizes[0].at("efficiency"), 1);
  auto words = lockstep_tool(what + "--ranks 16").said;
  std::ranges::replace(words, '\n', ' ');
  EXPECT_THAT(words, HasSubstr(fmt::format("{:.3g} times as fast as one alone", best / alone)));
}

TEST_F(PlanFigures, ASimulationThatIsCutSaysSo) {
  const std::string what = "simulate " + run_ + " --ranks 8 --save-seconds 60 --failure-hours ";
  const auto cut = lockstep_tool(what + "0.1").said;
  EXPECT_THAT(cut, HasSubstr("not done after 100000 failures, at which the simulation ends: "));
  EXPECT_THAT(cut, Not(HasSubstr(" in all")));
  const auto whole = lockstep_tool(what + "50000").said;
  EXPECT_THAT(whole, AllOf(HasSubstr(" in all, goodput 9"), Not(HasSubstr("not done"))));
}

TEST_F(PlanFigures, SeveralFailureRatesAreALineEach) {
  const std::string what = "simulate " + run_ + " --ranks 8 --save-seconds 60 ";
  const auto one = nlohmann::json::parse(lockstep_tool(what + "--failure-hours 900 --json").said);
  const auto three =
      nlohmann::json::parse(lockstep_tool(what + "--failure-hours 0.1,900,50000 --json").said);
  ASSERT_EQ(three.at("runs").size(), 3U);
  EXPECT_EQ(three["runs"][1], one.at("run"));
  EXPECT_LT(three["runs"][1]["expected_goodput"], three["runs"][2]["expected_goodput"]);
  const auto lines = lockstep_tool(what + "--failure-hours 0.1,900,50000").said;
  EXPECT_THAT(lines, AllOf(HasSubstr("a rank fails every"), HasSubstr("not done    100000\n")));
  const auto wrong = lockstep_tool(what + "--failure-hours 900,0");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.said, HasSubstr("--failure-hours: 0 is not a time"));
}

}  // namespace
}  // namespace lockstep::plan

// What the summary says of a run, and that the rest of the page says the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/train/run_report.h"

namespace lockstep::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

}  // namespace
}  // namespace lockstep::train

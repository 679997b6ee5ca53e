#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/train/metric.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;
using train::MetricState;

// A metric of a program, which needs all values at once.
class Largest : public Metric {
 public:
  std::string name() const override { return "largest"; }
  void update(const at::Tensor& outputs, const at::Tensor&, const at::Tensor&) override {
    begin_update();
    for (int64_t i = 0; i < outputs.numel(); ++i) state_.rows.push_back(outputs[i].item<double>());
  }

 protected:
  std::map<std::string, double> values_of(const MetricState& total) const override {
    return {{"largest", *std::max_element(total.rows.begin(), total.rows.end())}};
  }
};

TEST(Metrics, MayKeepRowsAlone) {
  for (const int ranks : {1, 3}) {
    spawn(ranks, [](World& world) {
      Largest largest;
      EXPECT_THAT(message_of<DataError>([&] { largest.compute(world); }),
                  HasSubstr("[largest] there is nothing to compute"));
      if (world.rank() == world.size() - 1) largest.update(at::tensor({2.0, 7.0}), {}, {});
      EXPECT_EQ(largest.compute(world), 7);
    });
  }
}

}  // namespace
}  // namespace lockstep::test

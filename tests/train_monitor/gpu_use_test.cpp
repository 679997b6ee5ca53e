#include "train/monitor/gpu_use.h"

#include <gtest/gtest.h>

namespace lockstep::train {
namespace {

TEST(GpuUse, IsThatOfTheGpuThatTheProcessSees) {
  const GpuLibraries fake{.driver = FAKE_GPU, .nvml = FAKE_GPU};
  EXPECT_DOUBLE_EQ(gpu_use(0, fake)(), 0.37);
  EXPECT_EQ(gpu_use(1, fake)(), -1) << "there is no such device";
}

TEST(GpuUse, IsNotKnownWithoutTheLibraries) {
  EXPECT_EQ(gpu_use(0, {.driver = "none.so", .nvml = FAKE_GPU})(), -1);
  EXPECT_EQ(gpu_use(0, {.driver = FAKE_GPU, .nvml = "none.so"})(), -1);
  EXPECT_EQ(gpu_use(0, {.driver = FAKE_GPU, .nvml = "libm.so.6"})(), -1);
}

}  // namespace
}  // namespace lockstep::train

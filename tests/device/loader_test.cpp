// A loader's batches on the device.
#include "lockstep/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/on_device.h"
#include "lockstep/data/tensor_dataset.h"

namespace lockstep::test {
namespace {

using data::LoaderOptions;
using data::TensorDataset;

// The device computes on each batch, later than the loop runs: a batch whose memory already serves
// for the next one would show.
TEST(LoaderOnDevice, BatchesArriveThereAndStayWhole) {
  spawn_on_device(2, [](World& world) {
    const TensorDataset set(at::arange(40).to(at::kFloat), at::arange(40));
    for (const int64_t prefetch : {0, 3}) {
      data::Loader loader(
          set, Shard{0, 1},
          {.batch_size = 4, .shuffle = false, .prefetch = prefetch, .device = world.device()});
      std::vector<at::Tensor> sums;
      for (const auto& [x, y] : loader.epoch(0)) {
        EXPECT_EQ(x.device(), world.device());
        EXPECT_EQ(y.device(), world.device());
        sums.push_back(x * 2 + y);
      }
      EXPECT_TRUE(at::cat(sums).cpu().equal(at::arange(40).to(at::kFloat) * 3)) << prefetch;
    }
  });
}

TEST(LoaderOnDevice, TargetsMayBeMissing) {
  spawn_on_device(1, [](World& world) {
    const TensorDataset set(at::arange(6), at::arange(6));
    const LoaderOptions options{.transforms = {[](data::Batch b) {
                                  return data::Batch{b.data, {}};
                                }},
                                .device = world.device()};
    data::Loader loader(set, world, options);
    for (const auto& [x, y] : loader.epoch(0)) {
      EXPECT_EQ(x.device(), fake::device());
      EXPECT_FALSE(y.defined());
    }
  });
}

// "cuda" without a number is the current device, in a thread as in the loop.
TEST(LoaderOnDevice, ThreadsHaveTheLoopsCurrentDevice) {
  spawn_on_device(2, [](World& world) {
    const TensorDataset set(at::arange(16), at::arange(16));
    const auto moved = [](data::Batch batch) {
      return data::Batch{batch.data.to(at::kPrivateUse1), batch.target};
    };
    for (const int64_t lanes : {0, 2}) {
      for (const int64_t workers : {0, 2}) {
        data::Loader loader(
            set, world,
            {.batch_size = 2, .workers = workers, .transforms = {moved}, .lanes = lanes});
        const auto check = [&](const data::Batch& batch) {
          EXPECT_EQ(batch.data.device().index(), world.rank()) << lanes << " " << workers;
        };
        if (lanes == 0) {
          for (const auto& batch : loader.epoch(0)) check(batch);
        } else {
          for (auto step : loader.steps(0)) {
            check(step.batch(step.lanes().begin));
          }
        }
      }
    }
  });
}

TEST(LoaderOnDevice, TheCpuIsADeviceToo) {
  const TensorDataset set(at::arange(8), at::arange(8));
  data::Loader loader(set, Shard{0, 1}, {.batch_size = 2, .device = at::kCPU});
  const void* memory = nullptr;
  for (const auto& [x, y] : loader.epoch(0)) {
    if (memory == nullptr) memory = x.const_data_ptr();
    EXPECT_EQ(x.const_data_ptr(), memory);  // serves again, as without
  }
}

}  // namespace
}  // namespace lockstep::test

// With how many threads a loader's own thread computes.
#include "support/threads.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <future>

#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/autocast.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::data {
namespace {

TEST(LoaderThreads, ComputeWithAsManyAsTheThreadThatTrains) {
  test::isolated([] {
    at::set_num_threads(1);
    const TensorDataset samples(at::ones({2, 2}), at::ones({2}));
    const at::Tensor square = at::ones({256, 256});  // filling it may need threads
    std::atomic<int64_t> started{-1};
    const auto product = [&](Batch batch) {
      const int64_t before = test::threads_of_process();
      (void)at::mm(square, square);
      started = test::threads_of_process() - before;
      return batch;
    };
    Loader loader(samples, Shard{0, 1}, {.batch_size = 2, .prefetch = 1, .transforms = {product}});
    for (const auto& batch : loader.epoch(0)) (void)batch;
    EXPECT_EQ(started, 0);
  });
}

// Such a thread has the loader's dispatch key, but not its generator.
TEST(LoaderThreads, ThatATransformStartsDrawNothing) {
  test::isolated([] {
    const TensorDataset samples(at::zeros({2, 2}), at::ones({2}));
    const auto noise = [](Batch batch) {
      std::promise<at::Tensor> drawn;
      at::launch([&] {
        try {
          drawn.set_value(at::rand({2}));
        } catch (...) {
          drawn.set_exception(std::current_exception());
        }
      });
      batch.data = batch.data + drawn.get_future().get();
      return batch;
    };
    for (const int64_t workers : {0, 1}) {
      Loader loader(samples, Shard{0, 1},
                    {.batch_size = 2, .workers = workers, .transforms = {noise}});
      EXPECT_THAT(test::message_of<DataError>([&] { (void)loader.epoch(0).begin(); }),
                  testing::HasSubstr("draws in a thread that a data set or transform has started"));
    }
  });
}

// An evaluation's loop may be under one, which the loader's threads do not see.
TEST(LoaderThreads, BatchesDoNotDependOnTheLoopsAutocast) {
  test::isolated([] {
    const at::Tensor square = at::rand({8, 8});
    const TensorDataset samples(at::rand({2, 8}), at::ones({2}));
    const auto product = [&](Batch batch) {
      batch.data = batch.data.matmul(square);
      return batch;
    };
    const parallel::Autocast autocast(at::kCPU, at::kBFloat16);
    for (const int64_t workers : {0, 1}) {
      Loader loader(samples, Shard{0, 1},
                    {.batch_size = 2, .workers = workers, .transforms = {product}});
      for (const auto& batch : loader.epoch(0)) EXPECT_EQ(batch.data.scalar_type(), at::kFloat);
    }
    EXPECT_EQ(samples.get_batch({0}).data.matmul(square).scalar_type(), at::kBFloat16);
  });
}

// Tensors of InferenceMode cannot be trained with outside of it.
TEST(LoaderThreads, BatchesDoNotDependOnTheLoopsInferenceMode) {
  test::isolated([] {
    const TensorDataset samples(at::rand({2, 8}), at::ones({2}));
    const auto doubled = [](Sample sample) { return Sample{sample.data * 2, sample.target}; };
    const c10::InferenceMode mode;
    for (const int64_t workers : {0, 1}) {
      Loader loader(samples, Shard{0, 1},
                    {.batch_size = 2, .workers = workers, .transforms = {doubled}});
      for (const auto& batch : loader.epoch(0)) EXPECT_FALSE(batch.data.is_inference());
    }
  });
}

}  // namespace
}  // namespace lockstep::data

// The optimizer of a run as a configuration describes it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "lockstep/checkpoint/interchange.h"
#include "train/printed.h"

namespace lockstep {
namespace {

using test::Folder;
using test::printed;
using test::small_run;
using train::RunConfig;

// A line's weight and bias after one step on two ranks, which begins at the same ones.
struct Line {
  explicit Line(const std::function<void(RunConfig&)>& change) {
    const Folder folder;
    auto config = small_run(folder / "run");
    config.optimizer = {.learning_rate = 0.1};
    config.training.max_steps = 1;
    change(config);
    printed(2, config);
    for (const auto& [name, tensor] : read_tensors(folder / "run/checkpoints")) {
      if (name == "model/weight") weight = tensor;
      if (name == "model/bias") bias = tensor;
    }
  }
  at::Tensor weight, bias;
};

void expect_biases_without_decay(const std::string& kind, double decay,
                                 const std::function<void(RunConfig&)>& change) {
  const auto line = [&](double weight_decay, const char* of) {
    return Line([&](RunConfig& config) {
      config.optimizer.kind = kind;
      config.optimizer.weight_decay = weight_decay;
      config.optimizer.weight_decay_of = of;
      change(config);
    });
  };
  const Line none = line(0, "all"), all = line(decay, "all"), matrices = line(decay, "matrices");
  ASSERT_FALSE(at::equal(none.weight, all.weight));
  ASSERT_FALSE(at::equal(none.bias, all.bias));
  EXPECT_TRUE(at::equal(matrices.weight, all.weight));
  EXPECT_TRUE(at::equal(matrices.bias, none.bias));
}

TEST(RunOptimizer, BiasesDoNotDecayWhereMatricesDo) {
  expect_biases_without_decay("sgd", 1, [](RunConfig&) {});
}

TEST(RunOptimizer, NorWhereTheyAreDivided) {
  expect_biases_without_decay("sgd", 1, [](RunConfig& config) { config.parallel.zero = true; });
  expect_biases_without_decay("sgd", 1,
                              [](RunConfig& config) { config.parallel.strategy = "fsdp"; });
}

// Of AdamW a weight decay of 0.01 is the default of libtorch's class, as 0 is of SGD's and Adam's.
TEST(RunOptimizer, NorUnderAdamW) {
  for (const double decay : {0.01, 0.1}) {
    expect_biases_without_decay("adamw", decay, [](RunConfig&) {});
  }
}

}  // namespace
}  // namespace lockstep

// What a checkpointed module returns: outputs that the loss does not use, its own tensors, views.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>

#include "lockstep/lockstep.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

at::Tensor rows_of_pair(int rank, int step) {
  return at::randn({4, 8}, at::detail::createCPUGenerator(100 * step + rank), at::kDouble);
}

enum class SecondOutput { Head, Weight, Buffer, Sum, Expanded };

// Returns two tensors.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(SecondOutput s) : second(s) {
    first = register_module("first", torch::nn::Linear(8, 8));
    head = register_module("head", torch::nn::Linear(8, 8));
    buffer = register_buffer("buffer", at::full({8}, 0.5));
    expanded = register_buffer("expanded", at::full({1}, 0.5).expand({8}));
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor y = first(x);
    switch (second) {
      case SecondOutput::Head:
        return {y, head(y)};
      case SecondOutput::Weight:
        return {y, first->weight};
      case SecondOutput::Buffer:
        return {y, buffer};
      case SecondOutput::Expanded:
        return {y, expanded};
      case SecondOutput::Sum:
        return {y.t().t(), y.sum(0)};
    }
    return {};
  }
  SecondOutput second;
  torch::nn::Linear first{nullptr}, head{nullptr};
  at::Tensor buffer, expanded;
};
TORCH_MODULE(Pair);

Pair pair_of(SecondOutput second) {
  torch::manual_seed(4);
  Pair pair(second);
  pair->to(at::kDouble);
  return pair;
}

using LossOfPair = std::function<at::Tensor(at::Tensor, at::Tensor)>;

// Steps with and without checkpointing: the same bits, and the same parameters without a gradient.
void expect_as_without(SecondOutput second, const LossOfPair& loss) {
  isolated([&] {
    Pair pair = pair_of(second), usual = pair_of(second);
    const ActivationCheckpointing recompute({pair.ptr()});
    for (int step = 0; step < 3; ++step) {
      for (Pair* each : {&pair, &usual}) {
        (*each)->zero_grad();
        auto [y, z] = call(*each, rows_of_pair(0, step));
        loss(y, z).backward();
      }
      const auto usual_parameters = usual->named_parameters();
      for (const auto& item : pair->named_parameters()) {
        const at::Tensor gradient = item.value().grad(),
                         other = usual_parameters[item.key()].grad();
        ASSERT_EQ(gradient.defined(), other.defined()) << item.key();
        if (gradient.defined()) {
          EXPECT_TRUE(at::equal(gradient, other)) << item.key();
        }
        EXPECT_TRUE(item.value().is_leaf()) << item.key();
      }
      for (const auto& buffer : pair->buffers()) EXPECT_FALSE(buffer.requires_grad());
    }
  });
}

TEST(ActivationCheckpointing, AnOutputThatTheLossDoesNotUseGivesNoGradient) {
  expect_as_without(SecondOutput::Head,
                    [](const at::Tensor& y, const at::Tensor&) { return y.sum(); });
}

TEST(ActivationCheckpointing, OutputsThatAreBuffersOrParameters) {
  const auto product = [](const at::Tensor& y, const at::Tensor& z) { return (y * z).sum(); };
  expect_as_without(SecondOutput::Buffer, product);
  expect_as_without(SecondOutput::Expanded, product);
  expect_as_without(SecondOutput::Weight, [](const at::Tensor& y, const at::Tensor& z) {
    return at::linear(y.tanh(), z).square().sum();
  });
}

TEST(ActivationCheckpointing, TwoOutputsOfWhichTheCallerChangesAViewInPlace) {
  expect_as_without(SecondOutput::Sum, [](at::Tensor y, const at::Tensor& z) {
    y.mul_(3);
    return (y.tanh() + z).square().sum();
  });
}

// An optimizer that moves what has a gradient, if only by weight decay, leaves the head alone.
TEST(ActivationCheckpointing, AHeadThatIsNotTrainedIsNotMoved) {
  spawn(2, [](World& world) {
    Pair pair = pair_of(SecondOutput::Head);
    const ActivationCheckpointing recompute({pair.ptr()});
    Ddp ddp(pair, world);
    torch::optim::AdamW optimizer(pair->parameters(), torch::optim::AdamWOptions(0.01));
    at::Tensor before;
    for (int step = 0; step < 3; ++step) {
      if (step == 1) before = pair->head->weight.detach().clone();
      ddp.zero_grad();
      auto [y, z] = call(pair, rows_of_pair(world.rank(), step));
      (step == 0 ? (y.square() + z.square()) : y.square()).mean().backward();
      optimizer.step();
    }
    EXPECT_TRUE(at::equal(before, pair->head->weight));
  });
}

TEST(ActivationCheckpointing, UnusedErrorFindsParametersOfAnUnusedOutput) {
  spawn(2, [](World& world) {
    Pair pair = pair_of(SecondOutput::Head);
    const ActivationCheckpointing recompute({pair.ptr()});
    const Ddp ddp(pair, world, {.unused = Unused::Error});
    const at::Tensor y = std::get<0>(call(pair, rows_of_pair(world.rank(), 0)));
    EXPECT_THROW(y.sum().backward(), ConfigError);
  });
}

// Parameters would silently get the second run's gradients, whichever were asked for.
TEST(ActivationCheckpointing, OnlyABackwardOfAllParametersIsTaken) {
  isolated([] {
    Pair pair = pair_of(SecondOutput::Head);
    const ActivationCheckpointing recompute({pair.ptr()});
    const auto refused = [&](const std::function<void(const at::Tensor&, const at::Tensor&)>& use) {
      const at::Tensor x = rows_of_pair(0, 0).requires_grad_(true);
      const at::Tensor loss = std::get<0>(call(pair, x)).square().sum();
      const std::string text = message_of<ConfigError>([&] { use(loss, x); });
      EXPECT_FALSE(pair->first->weight.grad().defined());
      return text;
    };
    EXPECT_THAT(
        refused([](const auto& loss, const auto& x) { torch::autograd::grad({loss}, {x}); }),
        ::testing::HasSubstr("torch::autograd::grad(), or backward() with inputs"));
    EXPECT_THAT(refused([&](const auto& loss, const auto&) {
                  loss.backward({}, std::nullopt, false, {{pair->head->weight}});
                }),
                ::testing::HasSubstr("backward() with inputs"));
    EXPECT_THAT(
        refused([&](const auto& loss, const auto& x) {
          loss.backward({}, std::nullopt, false, {{x}});
        }),
        ::testing::HasSubstr("backward() with inputs, through a module that is recomputed"));
    EXPECT_THAT(refused([](const auto& loss, const auto&) {
                  loss.backward({}, true, /*create_graph=*/true);
                }),
                ::testing::HasSubstr("backward(create_graph = true) through a module"));
  });
}

}  // namespace
}  // namespace lockstep::test

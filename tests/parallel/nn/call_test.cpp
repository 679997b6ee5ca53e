// lockstep::call is forward(), with what is attached to the module around it.
#include "lockstep/parallel/call.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using parallel::CallAttachment;
using parallel::CallDepth;
using parallel::CallLayer;

// Any type that call() does not know.
struct Cache {
  int calls = 0;
};
struct Odd {
  at::Tensor inside;
};

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(double f) : factor(f) {}
  at::Tensor forward(const at::Tensor& x, double more = 1) { return x * (factor * more); }
  double factor;
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(1.0)})
};
TORCH_MODULE(Scale);

struct PairedImpl : torch::nn::Module {
  std::tuple<at::Tensor, std::optional<at::Tensor>, int> forward(
      const at::Tensor& x, const std::vector<at::Tensor>& others, Cache& cache) {
    ++cache.calls;
    return {x + others.at(1), std::nullopt, 3};
  }
};

struct OddImpl : torch::nn::Module {
  Odd forward(const at::Tensor& x) { return {x}; }
};

// Notes its calls, doubles the inputs and adds one to the outputs.
struct LayerAround : CallLayer {
  explicit LayerAround(std::vector<int>& n, int i) : notes(n), number(i) {}
  Tensors call(const Tensors& inputs, const Body& body) override {
    notes.push_back(number);
    Tensors doubled;
    for (const auto& x : inputs) doubled.push_back(x * 2);
    Tensors results = body(doubled);
    for (auto& y : results) y = y + 1;
    seen = static_cast<int>(inputs.size());
    kept = body;
    return results;
  }
  std::vector<int>& notes;
  int number, seen = 0;
  Body kept;
};

TEST(Call, IsForwardWhenNothingIsAttached) {
  isolated([] {
    Scale scale(3);
    EXPECT_EQ(call(scale, torch::ones({1})).item<double>(), 3);
    EXPECT_EQ(call(*scale, torch::ones({1}), 2.0).item<double>(), 6);
    EXPECT_EQ(call(scale.ptr(), torch::ones({1})).item<double>(), 3);
    OddImpl odd;
    EXPECT_TRUE(call(odd, torch::ones({1})).inside.defined());
  });
}

TEST(Call, LayersSeeTheTensorsInsideArgumentsAndResults) {
  isolated([] {
    std::vector<int> notes;
    PairedImpl paired;
    LayerAround around(notes, 1);
    Cache cache;
    {
      const CallAttachment attachment(paired, around, CallDepth::Shard);
      const std::vector<at::Tensor> others{torch::ones({1}), torch::full({1}, 5)};
      const auto [sum, none, three] = call(paired, torch::ones({1}), others, cache);
      EXPECT_EQ(around.seen, 3);
      EXPECT_EQ(sum.item<double>(), 2 * 1 + 2 * 5 + 1);
      EXPECT_FALSE(none.has_value());
      EXPECT_EQ(three, 3);
      EXPECT_EQ(cache.calls, 1);
      EXPECT_EQ(others[1].item<double>(), 5);
      // As activation checkpointing does, with other tensors.
      EXPECT_EQ(around.kept({torch::ones({1}), {}, torch::ones({1})})[0].item<double>(), 2);
      EXPECT_EQ(cache.calls, 2);
    }
    call(paired, torch::ones({1}), std::vector<at::Tensor>(2, torch::ones({1})), cache);
    EXPECT_EQ(notes.size(), 1U);
  });
}

TEST(Call, LayersAreOrderedByDepthAndDetachAlone) {
  isolated([] {
    std::vector<int> notes;
    Scale scale(1);
    LayerAround inner(notes, 2), outer(notes, 1);
    std::optional<CallAttachment> first, second;
    first.emplace(*scale, inner, CallDepth::Recompute);
    second.emplace(*scale, outer, CallDepth::Shard);
    EXPECT_EQ(call(scale, torch::ones({1})).item<double>(), 4 + 1 + 1);
    EXPECT_EQ(notes, (std::vector<int>{1, 2}));
    second.reset();
    EXPECT_EQ(call(scale, torch::ones({1})).item<double>(), 2 + 1);
    EXPECT_EQ(notes, (std::vector<int>{1, 2, 2}));
  });
}

TEST(Call, ASequentialCallsItsModules) {
  isolated([] {
    std::vector<int> notes;
    Scale last(3);
    torch::nn::Sequential net;
    net->push_back(Scale(2));
    net->push_back(last);
    EXPECT_EQ(call(net, torch::ones({1})).item<double>(), 6);
    LayerAround around(notes, 1);
    const CallAttachment attachment(*last, around, CallDepth::Shard);
    EXPECT_EQ(call(net, torch::ones({1})).item<double>(), 2 * 2 * 3 + 1);
  });
}

TEST(Call, AResultThatCannotBeSeenIntoIsRefusedWhereSomethingIsAttached) {
  isolated([] {
    std::vector<int> notes;
    OddImpl odd;
    LayerAround around(notes, 1);
    const CallAttachment attachment(odd, around, CallDepth::Shard);
    const auto text = message_of<ConfigError>([&] { call(odd, torch::ones({1})); });
    EXPECT_NE(text.find("Odd, whose tensors cannot be seen"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace lockstep::test

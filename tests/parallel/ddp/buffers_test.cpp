// Buffers that Ddp writes to: under graphs that have saved them, and of every kind of memory.
#include "parallel/ddp/buffers/buffers.h"

#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

constexpr const char* kModified = "modified by an inplace operation";

// Its weight's gradient is its buffer.
struct Scaled : torch::nn::Module {
  explicit Scaled(const at::Tensor& first = at::ones({3})) {
    weight = register_parameter("weight", at::ones(first.sizes()));
    scale = register_buffer("scale", first);
  }
  at::Tensor forward() { return (weight * scale).sum(); }
  at::Tensor weight, scale;
};

at::Tensor threes(double value) { return at::full({3}, value); }

TEST(Buffers, AGraphWhoseBufferWasOverwrittenIsRefusedOnAllRanks) {
  spawn(2, [](World& world) {
    Scaled net;
    Ddp ddp(net, world.group());
    net.scale.fill_(world.rank() == 0 ? 2 : 11);
    const at::Tensor loss = net.forward();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(at::equal(net.weight.grad(), threes(6.5)));
    EXPECT_TRUE(at::equal(net.scale, threes(2)));
    EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr(kModified));
    // The group lives on.
    ddp.zero_grad();
    net.forward().backward();
    EXPECT_TRUE(at::equal(net.weight.grad(), threes(2)));
  });
}

TEST(Buffers, ABufferThatOneRankChangedIsRefusedOnAllRanksToo) {
  spawn(3, [](World& world) {
    for (const Buffers mode : {Buffers::Broadcast, Buffers::Average}) {
      Scaled net;
      Ddp ddp(net, world.group(), {.buffers = mode});
      net.forward().backward();
      if (world.rank() == 2) net.scale.fill_(4);
      ddp.zero_grad();
      const at::Tensor loss = net.forward();
      loss.backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(at::equal(net.weight.grad(), threes(2)));
      EXPECT_TRUE(at::equal(net.scale, threes(mode == Buffers::Average ? 2 : 1)));
      EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr(kModified));
    }
  });
}

TEST(Buffers, TwoLossesOnOneGraphOrTwoGraphsWithABufferThatNobodyChanges) {
  spawn(2, [](World& world) {
    for (const Buffers mode : {Buffers::Broadcast, Buffers::Average}) {
      Scaled net(threes(world.rank() == 0 ? 0.1 : 9));
      Ddp ddp(net, world.group(), {.buffers = mode});
      const at::Tensor first = net.forward(), second = net.forward();
      first.backward({}, /*retain_graph=*/true);
      first.backward();
      second.backward();
      EXPECT_TRUE(at::allclose(net.weight.grad(), threes(0.3)));
      EXPECT_TRUE(at::equal(net.scale, threes(0.1)));
    }
  });
}

TEST(Buffers, B39_AChangeOfRankZeroBetweenStepsIsSeenAfterSyncBuffersAndIsSaidOtherwise) {
  spawn(3, [](World& world) {
    Scaled net;
    Ddp ddp(net, world.group());
    const auto stderr_of_a_step = [&](double value) {
      ::testing::internal::CaptureStderr();
      ddp.zero_grad();
      net.forward().backward();
      EXPECT_TRUE(at::equal(net.weight.grad(), threes(value)));
      return ::testing::internal::GetCapturedStderr();
    };
    const auto version = net.scale._version();
    ddp.sync_buffers();
    EXPECT_EQ(net.scale._version(), version) << "nobody changed anything";
    if (world.rank() == 0) net.scale.fill_(4);
    ddp.sync_buffers();
    EXPECT_EQ(stderr_of_a_step(4), "");
    // All ranks alike.
    net.scale.fill_(5);
    EXPECT_EQ(stderr_of_a_step(5), "");
    if (world.rank() == 0) net.scale.fill_(8);
    const auto said = stderr_of_a_step(6);
    for (const auto* part :
         {"buffer 'scale' was changed on this rank", "Where forward() changes it, as that of an"}) {
      EXPECT_EQ(said.find(part) != std::string::npos, world.rank() == 0) << said;
    }
    EXPECT_EQ(stderr_of_a_step(8), "");
    if (world.rank() == 0) net.scale.fill_(2);
    EXPECT_EQ(stderr_of_a_step(6), "") << "said once";
  });
}

TEST(Buffers, TwoForwardsThroughBatchNormMayHaveTheirBackwardsLater) {
  spawn(2, [](World& world) {
    const auto train = [&](bool two_at_once) {
      torch::manual_seed(0);
      torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
      Ddp ddp(*net, world.group());
      const auto loss = [&](int step) {
        return net->forward(input(world.rank(), step)).pow(3).sum();
      };
      if (two_at_once) {
        const at::Tensor first = loss(0), second = loss(1);
        first.backward();
        second.backward();
      } else {
        loss(0).backward();
        loss(1).backward();
      }
      return gradients(*net);
    };
    expect_equal(train(true), train(false));
  });
}

TEST(Buffers, ParametersThatDdpOverwritesUnderAGraphAreRefused) {
  spawn(2, [](World& world) {
    Scaled net;
    const at::Tensor loss = net.weight.square().sum();
    Ddp ddp(net, world.group());
    EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr(kModified));
  });
}

// One buffer for each maker, plus a parameter to train.
using Make = std::function<at::Tensor(double value)>;

struct Several : torch::nn::Module {
  Several(const std::vector<Make>& makers, double value) {
    weight = register_parameter("weight", at::ones({2}));
    for (size_t i = 0; i < makers.size(); ++i) {
      held.push_back(register_buffer("buffer" + std::to_string(i), makers[i](value)));
    }
  }
  at::Tensor weight;
  std::vector<at::Tensor> held;
};

std::vector<Make> kinds() {
  const auto of = [](at::ScalarType dtype) {
    return [dtype](double value) { return at::full({3}, value).to(dtype); };
  };
  return {
      of(at::kDouble),
      of(at::kBFloat16),
      of(at::kLong),
      of(at::kByte),
      of(at::kUInt16),
      of(at::kFloat8_e4m3fn),
      [](double value) { return at::full({3}, value) > 1.5; },
      [](double value) { return at::complex(at::full({3}, value), at::full({3}, 2 * value)); },
      [](double value) { return at::complex(at::full({3}, value), at::full({3}, value)).conj(); },
      [](double value) {
        return at::imag(at::complex(at::zeros({3}), at::full({3}, value)).conj());
      },
      [](double) {
        return at::zeros({0, 4});
      },
      [](double value) { return at::scalar_tensor(value); },
      // Expanded, with gaps, transposed.
      [](double value) {
        return at::full({3, 1}, value).expand({2, 3, 4});
      },
      [](double value) {
        return at::full({3}, value).to(at::kLong).expand({5, 3});
      },
      [](double value) { return at::full({6}, value).slice(0, 0, 6, 2); },
      [](double value) {
        return at::full({2, 3}, value).t();
      },
  };
}

TEST(Buffers, OfEveryDtypeAndKindOfMemory) {
  spawn(3, [](World& world) {
    for (const Buffers mode : {Buffers::Broadcast, Buffers::Average}) {
      Several net(kinds(), world.rank() == 0 ? 1 : 7);
      const Several first(kinds(), 1);
      Ddp ddp(net, world.group(), {.buffers = mode});
      const auto expect_all = [&](double value, double average) {
        const Several want(kinds(), value), averaged(kinds(), average);
        for (size_t i = 0; i < net.held.size(); ++i) {
          const at::Tensor& got = net.held[i];
          const bool adds = got.is_complex() || (got.is_floating_point() && got.element_size() > 1);
          const at::Tensor& expected =
              mode == Buffers::Average && adds ? averaged.held[i] : want.held[i];
          EXPECT_EQ(got.strides(), expected.strides()) << "buffer " << i;
          EXPECT_TRUE(at::equal(got.to(at::kComplexDouble), expected.to(at::kComplexDouble)))
              << "buffer " << i << ": " << got;
        }
      };
      expect_all(1, 1);
      for (int step = 0; step < 2; ++step) {
        const double mine = world.rank() + 2;
        const Several next(kinds(), mine);
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < net.held.size(); ++i) {
          parallel::own_elements(net.held[i]).copy_(parallel::own_elements(next.held[i]));
        }
        const at::AutoGradMode grad(true);
        net.weight.sum().backward();
        expect_all(2, 3);
      }
    }
  });
}

// Rank 1 of 3 has another buffer or parameter: all ranks are told, and the group lives on.
template <typename Matcher>
void expect_refusal(const std::function<void(Several&)>& change, Matcher message) {
  spawn(3, [&](World& world) {
    Several net({}, 0);
    if (world.rank() == 1) change(net);
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp(net, world.group()); }), message);
    Scaled good;
    Ddp ddp(good, world.group());
  });
}

at::Tensor sliding_window() { return at::ones({4}).as_strided({3, 2}, {1, 1}); }

TEST(Buffers, WhatCannotBeWrittenIsRefusedOnAllRanks) {
  const auto add = [](const Make& make) {
    return [make](Several& net) { net.register_buffer("odd", make(1)); };
  };
  expect_refusal(add([](double) { return sliding_window(); }),
                 HasSubstr("rank 1: buffer 'odd' has elements that share a memory (sizes [3, 2], "
                           "strides [1, 1])"));
  expect_refusal(add([](double) { return at::zeros({3}, at::kMeta); }),
                 HasSubstr("rank 1: buffer 'odd' is on meta"));
  expect_refusal(add([](double) { return at::_empty_affine_quantized({3}, at::kQInt8, 1, 0); }),
                 HasSubstr("rank 1: buffer 'odd' is quantized"));
  expect_refusal(add([](double) {
                   const c10::InferenceMode inference;
                   return at::ones({3});
                 }),
                 HasSubstr("rank 1: buffer 'odd' was made under InferenceMode"));
  expect_refusal(add([](double) { return at::eye(3).to_sparse(); }),
                 HasSubstr("rank 1: buffer 'odd' is not dense"));
}

TEST(Buffers, OneThatIsUndefinedOnARankIsMissingThere) {
  spawn(3, [](World& world) {
    Several net({}, 0);
    net.register_buffer("odd", world.rank() == 1 ? at::Tensor() : at::ones({3}));
    EXPECT_THAT(message_of<ConfigError>([&] { Ddp(net, world.group()); }),
                HasSubstr("rank 0 has buffer 'odd': float32 [3]\n  rank 1 has nothing"));
    Several without({}, 0);
    without.register_buffer("odd", {});
    Ddp ddp(without, world.group());
    without.weight.sum().backward();
  });
}

TEST(Buffers, ParametersWhoseElementsShareAMemory) {
  expect_refusal(
      [](Several& net) {
        net.register_parameter("odd", at::ones({1, 2}).expand({3, 2}));
      },
      HasSubstr("rank 1: parameter 'odd' has elements that share a memory (sizes [3, 2], strides "
                "[0, 1])"));
  expect_refusal([](Several& net) { net.register_parameter("odd", sliding_window()); },
                 HasSubstr("rank 1: parameter 'odd' has elements that share a memory"));
  expect_refusal(
      [](Several& net) { net.register_parameter("odd", at::ones({3}).to(at::kFloat8_e4m3fn)); },
      HasSubstr("rank 1: parameter 'odd' is of float8_e4m3fn"));
  // Two parameters in one memory, and a frozen one that is expanded.
  spawn(2, [](World& world) {
    torch::nn::Module net;
    const at::Tensor memory = at::full({4}, 5.0 + world.rank());
    const at::Tensor front = net.register_parameter("front", memory.narrow(0, 0, 3)),
                     back = net.register_parameter("back", memory.narrow(0, 1, 3)),
                     frozen = net.register_parameter(
                         "frozen", at::full({1}, 5.0 + world.rank()).expand({3}), false);
    Ddp ddp(net, world.group());
    EXPECT_TRUE(at::equal(memory, at::full({4}, 5.0)));
    EXPECT_TRUE(at::equal(frozen, at::full({3}, 5.0)));
    ((front * (1.0 + world.rank())).sum() + back.sum()).backward();
    EXPECT_TRUE(at::equal(front.grad(), at::full({3}, 1.5)));
    EXPECT_TRUE(at::equal(back.grad(), at::ones({3})));
  });
}

}  // namespace
}  // namespace lockstep::test

// Modules of every make: dtypes, layouts, frozen and shared parameters, buffers.
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using torch::nn::Module;

// Parameters of several dtypes, each with a gradient that depends on the rank.
struct Mixed : Module {
  explicit Mixed(std::vector<at::ScalarType> dtypes) {
    torch::manual_seed(0);
    for (size_t i = 0; i < dtypes.size(); ++i) {
      register_parameter("p" + std::to_string(i), torch::randn({3, 5}).to(dtypes[i]));
    }
  }
};

at::Tensor mixed_loss(Module& module, int rank) {
  at::Tensor sum = at::zeros({});
  for (const auto& p : module.parameters()) {
    const auto square = p.is_complex() ? at::view_as_real(p).square() : p.square();
    sum = sum + (square.sum() * (rank + 0.5)).to(at::kFloat);
  }
  return sum;
}

class ModelWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ModelWorlds, ::testing::ValuesIn(kWorlds),
                         ::testing::PrintToStringParamName());

TEST_P(ModelWorlds, B15_B56_MixedDtypes) {
  spawn(GetParam(), [](World& world) {
    const std::vector<at::ScalarType> dtypes{at::kFloat, at::kDouble, at::kBFloat16,
                                             at::kFloat, at::kHalf,   at::kBFloat16};
    const auto make = [&] { return std::make_shared<Mixed>(dtypes); };
    expect_averages(world, make, mixed_loss);
    expect_averages(world, make, mixed_loss, {.bucket_bytes = {1, 1}});
  });
}

TEST_P(ModelWorlds, B57_ComplexParameters) {
  spawn(GetParam(), [](World& world) {
    const auto make = [] {
      return std::make_shared<Mixed>(
          std::vector{at::kComplexFloat, at::kFloat, at::kComplexDouble});
    };
    expect_averages(world, make, mixed_loss);
  });
}

TEST_P(ModelWorlds, B04_FrozenParametersHaveNoGradient) {
  spawn(GetParam(), [](World& world) {
    const auto make = [] {
      auto net = make_mlp();
      net->second->weight.requires_grad_(false);
      return net;
    };
    expect_averages(world, make, [](Mlp& m, int r) { return square_loss(m, r); });
  });
}

// One layer under two names: named_parameters() lists its tensors twice.
struct Tied : Module {
  Tied() {
    torch::manual_seed(0);
    layer = register_module("layer", torch::nn::Linear(6, 6));
    register_module("again", layer);
  }
  torch::nn::Linear layer{nullptr};
};

TEST_P(ModelWorlds, B31_SharedParametersAppearOnce) {
  spawn(GetParam(), [](World& world) {
    const auto make = [] { return std::make_shared<Tied>(); };
    expect_averages(world, make, [](Tied& m, int r) {
      return m.layer(torch::tanh(m.layer(input(r)))).square().mean();
    });
    if (world.size() == 1) return;
    Tied tied;
    Ddp ddp(tied, world.group());
    ASSERT_EQ(ddp.buckets().size(), 1U);
    EXPECT_THAT(ddp.buckets()[0].names, ::testing::ElementsAre("layer.bias", "layer.weight"));
  });
}

TEST(Models, B55_GradientsHaveTheParametersLayout) {
  spawn(2, [](World& world) {
    torch::manual_seed(0);
    torch::nn::Conv2d conv(3, 4, 3);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    const auto loss = [](torch::nn::Conv2dImpl& c, int r) {
      return c.forward(input(r, 0, 32).view({1, 3, 8, 8})).square().mean();
    };
    torch::nn::Conv2d plain(std::dynamic_pointer_cast<torch::nn::Conv2dImpl>(conv->clone()));
    std::vector<at::Tensor> mine;
    for (int rank = 0; rank < 2; ++rank) {
      plain->zero_grad();
      loss(*plain, rank).backward();
      mine.push_back(plain->weight.grad().clone());
    }
    Ddp ddp(*conv, world.group());
    for (int pass = 0; pass < 2; ++pass) {
      ddp.zero_grad();
      loss(*conv, world.rank()).backward();
      EXPECT_EQ(conv->weight.grad().strides(), conv->weight.strides());
      EXPECT_TRUE(at::equal(conv->weight.grad(), (mine[0] + mine[1]) / 2));
    }
  });
}

TEST(Models, B30_ParametersWithoutElements) {
  spawn(2, [](World& world) {
    const auto make = [] {
      auto net = make_mlp();
      net->register_parameter("nothing", torch::zeros({0, 4}));
      return net;
    };
    const auto loss = [](Mlp& m, int r) {
      return square_loss(m, r) + m.named_parameters()["nothing"].sum();
    };
    expect_averages(world, make, loss);
    expect_averages(world, make, loss, {.bucket_bytes = {1, 1}});
  });
}

struct Counter : Mlp {
  Counter() {
    count = register_buffer("count", at::zeros({2}, at::kLong));
    mean = register_buffer("mean", at::zeros({3}));
  }
  at::Tensor count, mean;
};

at::Tensor counting_step(Counter& net, World& world) {
  net.count += 1 + world.rank();
  net.mean += 0.5 + world.rank();
  return square_loss(net, world.rank());
}

TEST(Models, B39_BuffersBecomeRankZerosWithEachBackward) {
  spawn(3, [](World& world) {
    Counter net;
    Ddp ddp(net, world.group());
    for (int step = 1; step < 4; ++step) {
      counting_step(net, world).backward();
      EXPECT_TRUE(at::equal(net.count, at::full({2}, step, at::kLong)));
      EXPECT_TRUE(at::equal(net.mean, at::full({3}, 0.5 * step)));
    }
  });
}

TEST(Models, B39_BuffersStayUnderHold) {
  spawn(2, [](World& world) {
    Counter net;
    Ddp ddp(net, world.group());
    const auto hold = ddp.hold();
    counting_step(net, world).backward();
    EXPECT_TRUE(at::equal(net.count, at::full({2}, 1 + world.rank(), at::kLong)));
  });
}

TEST(Models, B40_BuffersMayBeLeftAloneAndSyncedByHand) {
  spawn(2, [](World& world) {
    Counter net;
    Ddp ddp(net, world.group(), {.buffers = Buffers::None});
    counting_step(net, world).backward();
    EXPECT_TRUE(at::equal(net.count, at::full({2}, 1 + world.rank(), at::kLong)));
    ddp.sync_buffers();
    EXPECT_TRUE(at::equal(net.count, at::full({2}, 1, at::kLong)));
  });
}

// The broadcast writes to running statistics that the graph has saved.
TEST(Models, ABackwardMayBeRepeatedWithBatchNorm) {
  spawn(2, [](World& world) {
    torch::manual_seed(0);
    torch::nn::Sequential net;
    net->push_back(torch::nn::Linear(6, 4));
    net->push_back(torch::nn::BatchNorm1d(4));
    Ddp ddp(*net, world.group());
    // What is normalised has the same sum of squares whatever the weights are: weighted, it has
    // not.
    const at::Tensor weights = input(2).narrow(1, 0, 4);
    const auto loss = (net->forward(input(world.rank())) * weights).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    const auto once = gradients(*net)[0].clone();
    EXPECT_GT(once.abs().max().item<float>(), 1e-2);
    ddp.zero_grad();
    loss.backward();
    EXPECT_TRUE(at::equal(gradients(*net)[0], once));
  });
}

}  // namespace
}  // namespace lockstep::test

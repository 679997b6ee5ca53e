// Activation checkpointing: a backward that runs another backward inside.
#include "parallel/recomputed.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A checkpoint around a checkpoint.
struct CheckpointedBlock : torch::autograd::Function<CheckpointedBlock> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = layer;
    return torch::tanh(reinterpret_cast<torch::nn::LinearImpl*>(layer)->forward(x));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const int64_t layer = context->saved_data["layer"].toInt();
    const auto x = context->get_saved_variables()[0].detach().requires_grad_(true);
    {
      const at::AutoGradMode enable_grad(true);
      torch::tanh(Checkpoint::apply(x, layer)).backward(gradients[0]);
    }
    return {x.grad(), {}};
  }
};

TEST(Checkpoint, B38_ALayerRecomputedInBackwardIsAveraged) {
  spawn(2, [](World& world) {
    const auto loss = [](Mlp& net, int rank) {
      const auto x = net.first(input(rank));
      return net.third(torch::tanh(checkpointed(net.second, torch::tanh(x)))).square().mean();
    };
    expect_averages(world, make_mlp, loss, {.bucket_bytes = {1, 1}});
    expect_averages(world, make_mlp, [](Mlp& net, int rank) { return square_loss(net, rank); });
  });
}

// Whether the layer is used, and whether it is checkpointed, depends on rank and step.
TEST(Checkpoint, B38_ACheckpointedLayerMayBeUnusedAndChangeFromStepToStep) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    for (int step = 0; step < 4; ++step) {
      const auto loss = [step](Mlp& m, int rank) {
        const auto x = torch::tanh(m.first(input(rank, step)));
        const bool skipped = step == 1 && rank == 0;
        return m.third(skipped     ? x
                       : step == 2 ? m.second(x)
                                   : checkpointed(m.second, x))
            .square()
            .mean();
      };
      ddp.zero_grad();
      loss(net, world.rank()).backward();
      expect_equal(gradients(net), average_gradients(2, make_mlp, loss));
    }
  });
}

constexpr int kLayers = 6;

struct Deep : torch::nn::Module {
  Deep() {
    torch::manual_seed(0);
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
  }
  std::vector<torch::nn::Linear> layers;
};

enum class Around { Checkpoint, TwoCheckpoints };

// No gradient of a parameter arrives in the outer backward().
at::Tensor deep_loss(Deep& net, int rank, Around around, size_t used = kLayers) {
  at::Tensor x = input(rank).requires_grad_(true);
  for (size_t i = 0; i < used; ++i) {
    const auto layer = reinterpret_cast<int64_t>(net.layers[i].get());
    x = around == Around::Checkpoint ? torch::tanh(Checkpoint::apply(x, layer))
                                     : CheckpointedBlock::apply(x, layer);
  }
  return x.square().mean();
}

TEST(Checkpoint, B38_AllLayersRecomputedAreReducedOnce) {
  for (const auto around : {Around::Checkpoint, Around::TwoCheckpoints}) {
    spawn(2, [&](World& world) {
      const auto loss = [&](Deep& net, int rank) { return deep_loss(net, rank, around); };
      const auto want = average_gradients(
          2, [] { return std::make_shared<Deep>(); }, loss);
      Deep net;
      Ddp ddp(net, world.group(), {.bucket_bytes = {100}, .unused = Unused::Error});
      for (int pass = 1; pass <= 3; ++pass) {
        ddp.zero_grad();
        loss(net, world.rank()).backward();
        expect_equal(gradients(net), want);
        EXPECT_EQ(ddp.log().pass_count, pass);
      }
    });
  }
}

TEST(Checkpoint, B38_UnusedLayersAmongRecomputedOnes) {
  spawn(2, [](World& world) {
    const auto loss = [](Deep& net, int rank) {
      return deep_loss(net, rank, Around::Checkpoint, kLayers - 2 * rank);
    };
    const auto make = [] { return std::make_shared<Deep>(); };
    expect_averages(world, make, loss, {.bucket_bytes = {1}});
    Deep net;
    Ddp ddp(net, world.group(), {.unused = Unused::Error});
    EXPECT_THROW(loss(net, world.rank()).backward(), ConfigError);
  });
}

// The pass began in a checkpoint that ended well; the next one throws.
TEST(Checkpoint, B38_AnExceptionAfterARecomputedLayerEndsThePass) {
  spawn(2, [](World& world) {
    Deep net;
    Ddp ddp(net, world.group());
    const auto weight = net.layers[2]->weight;
    const auto handle = weight.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
    EXPECT_THROW(deep_loss(net, world.rank(), Around::Checkpoint).backward(), std::runtime_error);
    weight.remove_hook(handle);
    ddp.zero_grad();
    const auto loss = [](Deep& m, int r) { return deep_loss(m, r, Around::Checkpoint); };
    loss(net, world.rank()).backward();
    expect_equal(gradients(net), average_gradients(
                                     2, [] { return std::make_shared<Deep>(); }, loss));
  });
}

// The first gradient of the shared layer may be travelling when the second one comes.
TEST(Checkpoint, B38_ALayerReachedTwiceIsRefusedByName) {
  spawn(2, [](World& world) {
    const auto loss = [](Mlp& net, int rank) {
      const auto x = checkpointed(net.second, torch::tanh(net.first(input(rank))));
      return net.third(checkpointed(net.second, torch::tanh(x))).square().mean();
    };
    Mlp net;
    Ddp ddp(net, world.group());
    try {
      loss(net, world.rank()).backward();
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(
          error.what(),
          ::testing::ContainsRegex("rank .: parameter 'second\\.(weight|bias)' received a second"));
    }
    // What the message advises.
    ddp.zero_grad();
    {
      const auto hold = ddp.hold();
      loss(net, world.rank()).backward();
    }
    (net.first->weight.sum() * 0).backward();
    const auto want = average_gradients(2, make_mlp, loss);
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients(net)[i], want[i], 1e-5, 1e-7));
    }
  });
}

}  // namespace
}  // namespace lockstep::test

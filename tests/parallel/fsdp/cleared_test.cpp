// Gradients that are cleared through the module, whose own have none, or on one rank only; and
// parameters that one rank has frozen.
#include <functional>
#include <optional>

#include "lockstep/core/error.h"
#include "parallel/fsdp/models.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using parallel::Hold;
using parallel::Lane;
using parallel::StepKey;
using parallel::units_of;
using testing::AllOf;
using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

using Clear = std::function<void(Tower&)>;

void clear_module(Tower& net) { net->zero_grad(); }
void reset_each(Tower& net) {
  for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
}
void clear_one_block(Tower& net) { net->blocks[1]->zero_grad(); }

FsdpOptions of_blocks(const Tower& net, FsdpOptions options) {
  options.units = units_of<BlockImpl>(*net);
  return options;
}

// Both sum up micro-batches, clip and make steps; the module's gradients are cleared between them.
void expect_trains_as_ddp(World& world, const FsdpOptions& options, const Clear& clear) {
  Tower net, usual;
  Fsdp fsdp(net, world.group(), of_blocks(net, options));
  Ddp ddp(usual, world.group());
  SGD divided(fsdp.parameters(), SGDOptions(0.1).momentum(0.9));
  SGD whole(usual->parameters(), SGDOptions(0.1).momentum(0.9));
  const auto backward = [&](auto& model, auto& attached, int step) {
    {
      const Hold hold = attached.hold();
      tower_loss(model, world.rank(), 10 * step).backward();
    }
    const at::Tensor loss = tower_loss(model, world.rank(), 10 * step + 1);
    {
      const Hold hold = attached.hold();
      (loss * 0.3).backward({}, /*retain_graph=*/true);
    }
    (loss * 0.7).backward();
  };
  for (int step = 0; step < 3; ++step) {
    clear(net);
    clear(usual);
    backward(net, fsdp, step);
    backward(usual, ddp, step);
    expect_same_gradients(fsdp, usual, 0);
    divided.step();
    whole.step();
  }
  expect_same_parameters(fsdp, net, usual);
}

TEST(FsdpCleared, ThroughTheModuleAsThroughAnOptimizer) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      const Folder folder;
      for (const FsdpOptions& options :
           {FsdpOptions{}, FsdpOptions{.share_memory = false},
            FsdpOptions{.reshard_after_forward = false, .share_memory = false},
            FsdpOptions{.offload = parallel::Offload::File, .offload_folder = folder.path()}}) {
        expect_trains_as_ddp(world, options, clear_module);
        expect_trains_as_ddp(world, options, reset_each);
      }
    });
  }
}

// The others' add up.
TEST(FsdpCleared, OfSomeParametersOnly) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    const Ddp ddp(usual, world.group());
    for (int step = 0; step < 3; ++step) {
      clear_one_block(net);
      clear_one_block(usual);
      tower_loss(net, world.rank(), step).backward();
      tower_loss(usual, world.rank(), step).backward();
      expect_same_gradients(fsdp, usual, 1e-6);
    }
  });
}

TEST(FsdpCleared, WhatWasHeldIsGone) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    Ddp ddp(usual, world.group());
    const auto backward = [&](int step, bool held) {
      std::optional<Hold> first, second;
      if (held) {
        first.emplace(fsdp.hold());
        second.emplace(ddp.hold());
      }
      tower_loss(net, world.rank(), step).backward();
      tower_loss(usual, world.rank(), step).backward();
    };
    for (const Clear& clear : {Clear(clear_module), Clear(clear_one_block)}) {
      for (const bool again : {false, true}) {
        fsdp.zero_grad();
        ddp.zero_grad();
        backward(0, true);
        clear(net);
        clear(usual);
        if (again) backward(1, true);
        backward(2, false);
        expect_same_gradients(fsdp, usual, 0);
      }
    }
  });
}

TEST(FsdpCleared, BeforeTheLanesOfAStep) {
  on_both([](World& world, FsdpOptions options) {
    Tower net, usual;
    options.lanes = 3;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    Ddp ddp(usual, world.group(), {.lanes = 3});
    for (int step = 0; step < 3; ++step) {
      const auto run = [&](Tower& model, auto& attached) {
        model->zero_grad();
        for (const Lane lane : attached.lanes(StepKey{.seed = 1, .step = step})) {
          tower_loss(model, static_cast<int>(lane.index), step).backward();
        }
      };
      run(net, fsdp);
      run(usual, ddp);
      expect_same_gradients(fsdp, usual, 0);
    }
  });
}

TEST(FsdpCleared, WhatSomebodyKeepsStaysAsItWas) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    const auto leaves = fsdp.parameters();
    std::vector<at::Tensor> kept, values;
    for (int step = 0; step < 4; ++step) {
      for (size_t i = 0; i < leaves.size(); ++i) {
        at::Tensor& gradient = leaves[i].mutable_grad();
        if (!gradient.defined() || (step == 2 && i % 2 == 0)) continue;  // that one is added to
        kept.push_back(i % 3 == 0 ? gradient : gradient.detach());
        values.push_back(gradient.clone());
        gradient.reset();
      }
      tower_loss(net, world.rank(), step).backward();
    }
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], values[i])) << i;
  });
}

TEST(FsdpCleared, OneThatWasGivenOtherMemoryIsNotUsedAgain) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    const Ddp ddp(usual, world.group());
    tower_loss(net, world.rank(), 0).backward();
    for (auto& leaf : fsdp.parameters()) {
      at::Tensor& gradient = leaf.mutable_grad();
      gradient.set_data(at::zeros_like(gradient));
      gradient.reset();
    }
    tower_loss(net, world.rank(), 1).backward();
    tower_loss(usual, world.rank(), 1).backward();
    expect_same_gradients(fsdp, usual, 0);
  });
}

TEST(FsdpCleared, ClippingSeesIt) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    tower_loss(net, world.rank(), 0).backward();
    net->zero_grad();
    EXPECT_EQ(fsdp.clip_grad_norm_(1.0).item<double>(), 0);
    for (const auto& leaf : fsdp.parameters()) EXPECT_FALSE(leaf.grad().defined());
  });
}

TEST(FsdpCleared, OnOneRankOnlyIsRefusedOnAll) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    SGD sgd(fsdp.parameters(), SGDOptions(0.1));
    const Ddp ddp(usual, world.group());
    const std::vector<std::function<void()>> ways = {[&] { net->zero_grad(); },
                                                     [&] { sgd.zero_grad(); }};
    for (const auto& clear : ways) {
      fsdp.zero_grad();
      tower_loss(net, world.rank(), 0).backward();
      if (world.rank() == 1) clear();
      EXPECT_THAT(message_of<ConfigError>([&] { tower_loss(net, world.rank(), 1).backward(); }),
                  AllOf(HasSubstr("[fsdp] rank 1: the gradient of parameter 'words.weight' was "
                                  "cleared on this rank and not on another"),
                        HasSubstr("on all ranks or on none")));
    }
    fsdp.zero_grad();
    tower_loss(net, world.rank(), 2).backward();
    tower_loss(usual, world.rank(), 2).backward();
    expect_same_gradients(fsdp, usual, 0);
  });
}

TEST(FsdpCleared, ByAnOptimizerOfThePartsThatHaveElements) {
  on_both([](World& world, const FsdpOptions& options) {
    torch::nn::Linear net(3, 2);  // which rank 0 has
    Fsdp fsdp(net, world.group(), options);
    const at::Tensor x = at::ones({4, 3});
    for (int step = 0; step < 3; ++step) {
      call(net, x).sum().backward();
      for (const auto& leaf : fsdp.parameters()) {
        EXPECT_TRUE(leaf.grad().defined());
        if (leaf.numel() == 0) continue;
        EXPECT_TRUE(at::equal(leaf.grad(), at::full_like(leaf, 4)));
        leaf.mutable_grad().reset();
      }
    }
  });
}

TEST(FsdpFrozen, OnOneRankOnlyIsRefusedOnAll) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    const Ddp ddp(usual, world.group());
    tower_loss(net, world.rank(), 0).backward();
    fsdp.zero_grad();
    if (world.rank() == 1) net->head->weight.set_requires_grad(false);
    EXPECT_THAT(message_of<ConfigError>([&] { tower_loss(net, world.rank(), 1).backward(); }),
                AllOf(HasSubstr("[fsdp] rank 1: parameter 'head.weight' is frozen on this rank"),
                      HasSubstr("freeze it on all ranks")));
    fsdp.zero_grad();
    net->head->weight.set_requires_grad(true);
    tower_loss(net, world.rank(), 2).backward();
    tower_loss(usual, world.rank(), 2).backward();
    expect_same_gradients(fsdp, usual, 0);
  });
}

// Also between a forward and its backward, and for every second step only, as in a GAN.
TEST(FsdpFrozen, OnAllRanksIsNot) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), of_blocks(net, options));
    Ddp ddp(usual, world.group());
    const auto set_trainable = [&](bool trains) {
      for (Tower& model : {std::ref(net), std::ref(usual)}) {
        for (auto& parameter : model->blocks[1]->parameters()) parameter.set_requires_grad(trains);
      }
    };
    const auto zero_grad = [&] {
      fsdp.zero_grad();
      ddp.zero_grad();
    };
    for (int step = 0; step < 4; ++step) {
      zero_grad();
      set_trainable(step % 2 == 0);
      tower_loss(net, world.rank(), step).backward();
      tower_loss(usual, world.rank(), step).backward();
      expect_same_gradients(fsdp, usual, 0);
    }
    zero_grad();
    set_trainable(true);
    const at::Tensor loss = tower_loss(net, world.rank(), 5);
    const at::Tensor other = tower_loss(usual, world.rank(), 5);
    set_trainable(false);
    loss.backward();
    other.backward();
    expect_same_gradients(fsdp, usual, 0);
    tower_loss(net, world.rank(), 6).backward();
  });
}

}  // namespace
}  // namespace lockstep::test

// Hooks of a model that changes while it trains.
#include <fstream>
#include <optional>

#include "lockstep/parallel/hooks.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using parallel::CastOptions;
using parallel::Tensors;

std::vector<std::shared_ptr<CommHook>> hooks_with_residuals() {
  return {std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true}),
          std::make_shared<PowerSgd>(
              PowerSgdOptions{.rank = 1, .start_iteration = 1, .least_compression = 1.1}),
          std::make_shared<TopK>(TopKOptions{.fraction = 0.1})};
}

// What the hook keeps for parameters whose names begin so.
Tensors kept_for(const CommHook& hook, const std::string& layer) {
  Tensors kept;
  for (const auto& [name, tensor] : hook.state()) {
    const std::string parameter = name.substr(name.find('/') + 1);
    if (parameter.starts_with(layer)) kept[name] = tensor.clone();
  }
  return kept;
}

void expect_same(const Tensors& got, const Tensors& want) {
  EXPECT_EQ(got.size(), want.size());
  for (const auto& [name, tensor] : want) {
    EXPECT_TRUE(got.contains(name) && at::equal(got.at(name), tensor)) << name;
  }
}

void passes(Ddp& ddp, Mlp& net, World& world, int from, int to) {
  for (int step = from; step < to; ++step) {
    ddp.zero_grad();
    square_loss(net, world.rank(), step).backward();
  }
}

TEST(HookState, AParameterThatReplacesAnotherDoesNotInheritWhatWasKeptForIt) {
  spawn(2, [](World& world) {
    for (const bool remade : {false, true}) {
      for (const auto& hook : hooks_with_residuals()) {
        SCOPED_TRACE(hook->name());
        Mlp net;
        std::optional<Ddp> ddp;
        ddp.emplace(net, world.group(), parallel::DdpOptions{.hook = hook});
        passes(*ddp, net, world, 0, 3);
        const auto first = kept_for(*hook, "first"), second = kept_for(*hook, "second");
        EXPECT_FALSE(first.empty());
        EXPECT_FALSE(second.empty());
        if (remade) ddp.reset();
        net.second = net.replace_module("second", torch::nn::Linear(8, 8));
        if (remade) {
          ddp.emplace(net, world.group(), parallel::DdpOptions{.hook = hook});
        } else {
          ddp->refresh();
        }
        expect_same(kept_for(*hook, "first"), first);
        expect_same(kept_for(*hook, "second"), {});
        passes(*ddp, net, world, 3, 4);
        EXPECT_EQ(kept_for(*hook, "second").size(), second.size());
      }
    }
  });
}

TEST(HookState, StaysWithAParameterThatHasAnotherName) {
  spawn(2, [](World& world) {
    for (const auto& hook : hooks_with_residuals()) {
      SCOPED_TRACE(hook->name());
      torch::manual_seed(1);
      torch::nn::Linear a(6, 6), b(6, 6), c(6, 6);
      torch::nn::Sequential all(a, b, c), rest(b, c);
      Tensors before;
      {
        Ddp ddp(all, world.group(), {.hook = hook});
        for (int step = 0; step < 3; ++step) {
          ddp.zero_grad();
          all->forward(input(world.rank(), step)).square().mean().backward();
        }
        for (const auto& [name, tensor] : hook->state()) before[name] = tensor.clone();
      }
      Ddp ddp(rest, world.group(), {.hook = hook});
      size_t count = 0;
      for (const std::string prefix : {"", "error/", "q/"}) {
        for (const std::string name : {".weight", ".bias"}) {
          if (!before.contains(prefix + "1" + name)) continue;
          ++count;
          const auto after = hook->state();
          EXPECT_TRUE(at::equal(after.at(prefix + "0" + name), before.at(prefix + "1" + name)));
          EXPECT_TRUE(at::equal(after.at(prefix + "1" + name), before.at(prefix + "2" + name)));
          EXPECT_FALSE(after.contains(prefix + "2" + name));
        }
      }
      EXPECT_EQ(count, 2);
    }
  });
}

// The model before is gone, so names say what belongs to whom.
TEST(HookState, ThatWasRestoredGoesToTheModelThatComesNext) {
  spawn(2, [](World& world) {
    for (const auto& hook : hooks_with_residuals()) {
      SCOPED_TRACE(hook->name());
      Tensors saved;
      {
        Mlp net;
        Ddp ddp(net, world.group(), {.hook = hook});
        passes(ddp, net, world, 0, 3);
        saved = kept_for(*hook, "");
      }
      hook->restore(saved);
      Mlp next;
      Ddp ddp(next, world.group(), {.hook = hook});
      expect_same(kept_for(*hook, ""), saved);
    }
  });
}

// Two models on one frozen part: names say what belongs to the second one's own.
TEST(HookState, ThatWasRestoredGoesToTheNextModelOnTheSameFrozenPart) {
  spawn(2, [](World& world) {
    for (const auto& hook : hooks_with_residuals()) {
      SCOPED_TRACE(hook->name());
      torch::nn::Linear common(6, 8);
      for (auto& parameter : common->parameters()) parameter.requires_grad_(false);
      const auto train = [&](int steps) {
        torch::nn::Sequential net(common, torch::nn::Linear(8, 8));
        Ddp ddp(net, world.group(), {.hook = hook});
        const Tensors begun = kept_for(*hook, "");
        for (int step = 0; step < steps; ++step) {
          ddp.zero_grad();
          net->forward(input(world.rank(), step)).square().mean().backward();
        }
        return begun;
      };
      train(3);
      const Tensors saved = kept_for(*hook, "");
      EXPECT_FALSE(kept_for(*hook, "1.").empty());
      hook->restore(saved);
      expect_same(train(0), saved);
    }
  });
}

// Otherwise ranks that come later give it to the layer in the other's place, or refuse its sizes.
TEST(HookState, OfALayerThatWasReplacedInAGroupOfOneIsGone) {
  spawn(1, [](World& world) {
    const auto hook = std::make_shared<TopK>(TopKOptions{.fraction = 0.1});
    Mlp net;
    Ddp ddp(net, world.group(), {.hook = hook});
    const Tensors saved{{"first.weight", at::ones({8, 6})}, {"third.bias", at::ones({3})}};
    hook->restore(saved);
    net.third = net.replace_module("third", torch::nn::Linear(8, 3));
    ddp.refresh();
    expect_same(kept_for(*hook, ""), {{"first.weight", at::ones({8, 6})}});
  });
}

// There is nothing kept for it before its first pass, nor after one that overflows.
TEST(HookState, IsRestoredWithoutAParameterThatWasNewWhenItWasSaved) {
  spawn(2, [](World& world) {
    for (const bool overflows : {false, true}) {
      for (size_t i = 0; i < hooks_with_residuals().size(); ++i) {
        const auto hook = hooks_with_residuals()[i];
        SCOPED_TRACE(hook->name());
        Mlp net;
        for (auto& parameter : net.first->parameters()) parameter.requires_grad_(false);
        Ddp ddp(net, world.group(), {.hook = hook});
        passes(ddp, net, world, 0, 3);
        for (auto& parameter : net.first->parameters()) parameter.requires_grad_(true);
        ddp.refresh();
        if (overflows) (square_loss(net, world.rank(), 3) * INFINITY).backward();
        const auto saved = kept_for(*hook, "");
        EXPECT_EQ(kept_for(*hook, "first").size(), 0);
        passes(ddp, net, world, 4, 6);
        for (const bool early : {true, false}) {
          const auto other = hooks_with_residuals()[i];
          if (early) other->restore(saved);
          Mlp resumed;
          Ddp again(resumed, world.group(), {.hook = other});
          if (!early) other->restore(saved);
          passes(again, resumed, world, 4, 6);
          expect_equal(gradients(resumed), gradients(net));
          expect_same(kept_for(*other, ""), kept_for(*hook, ""));
        }
      }
    }
  });
}

// This process's mappings of memory that ranks share.
int64_t mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:lockstep ") != line.npos) ++count;
  }
  return count;
}

// A run that ends while they are frozen goes on as one that did not end.
TEST(HookState, OfParametersThatAreFrozenIsKeptAndRestored) {
  spawn(2, [](World& world) {
    for (size_t i = 0; i < hooks_with_residuals().size(); ++i) {
      const auto hook = hooks_with_residuals()[i];
      SCOPED_TRACE(hook->name());
      Mlp net;
      Ddp ddp(net, world.group(), {.hook = hook});
      passes(ddp, net, world, 0, 3);
      const auto freeze = [](Mlp& model, bool frozen) {
        for (auto& parameter : model.first->parameters()) parameter.requires_grad_(!frozen);
      };
      freeze(net, true);
      const auto first = kept_for(*hook, "first"), saved = kept_for(*hook, "");
      EXPECT_FALSE(first.empty());
      ddp.refresh();
      expect_same(kept_for(*hook, "first"), first);
      for (const bool early : {true, false}) {
        const auto other = hooks_with_residuals()[i];
        if (early) other->restore(saved);
        Mlp resumed;
        freeze(resumed, true);
        Ddp again(resumed, world.group(), {.hook = other});
        if (!early) other->restore(saved);
        freeze(resumed, false);
        again.refresh();
        expect_same(kept_for(*other, ""), saved);
      }
    }
  });
}

TEST(CastHook, KeepsNoMemoryOfBucketsThatAreGone) {
  spawn(2, [](World& world) {
    torch::nn::Module net;
    auto weight = net.register_parameter("weight", torch::zeros({200'000}));
    Ddp ddp(net, world.group(), {.hook = std::make_shared<CastHook>(at::kHalf)});
    std::vector<int64_t> counts;
    for (int64_t size = 200'000; size < 200'640; size += 64) {
      weight.set_data(torch::zeros({size}));
      weight.mutable_grad().reset();
      ddp.refresh();
      weight.sum().backward();
      counts.push_back(mappings());
    }
    EXPECT_GT(counts.front(), 0);
    EXPECT_EQ(counts.back(), counts.front());
  });
}

}  // namespace
}  // namespace lockstep::test

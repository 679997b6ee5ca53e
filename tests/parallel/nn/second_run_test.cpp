// What a second run of a recomputed forward() needs from the first: a history where a result has
// one, the parameters as they were, and the same results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "lockstep/lockstep.h"
#include "parallel/fsdp/models.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

Tensor rows_at(int step) {
  return at::randn({4, 6}, at::detail::createCPUGenerator(step), at::kDouble);
}

struct Layered : torch::nn::Module {
  Layered() { this->to(at::kDouble); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(6, 6));
};

// Its state has no history, as in truncated backpropagation through time.
struct AssignsState : Layered {
  Tensor forward(const Tensor& x, Tensor& state) {
    const Tensor y = torch::tanh(layer(x) + layer(state));
    state = y.detach();
    return y;
  }
};
// Nor have the others of its results: integers and an argument are among them.
struct ReturnsState : Layered {
  std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& state) {
    const Tensor y = torch::tanh(layer(x) + layer(state));
    return {y, y.detach(), y.argmax(1), state};
  }
};

template <class Cell>
std::vector<Tensor> gradients_of_steps(const std::function<Tensor(Cell&, int, Tensor&)>& run,
                                       bool is_recomputed) {
  torch::manual_seed(4);
  const auto cell = std::make_shared<Cell>();
  std::optional<ActivationCheckpointing> recompute;
  if (is_recomputed) recompute.emplace(Modules{cell});
  Tensor state = rows_at(9);
  std::vector<Tensor> all;
  for (int step = 0; step < 3; ++step) {
    cell->zero_grad();
    const Tensor y = run(*cell, step, state);
    EXPECT_TRUE(y.requires_grad());
    EXPECT_FALSE(state.requires_grad());
    y.square().sum().backward();
    all.push_back(cell->layer->weight.grad());
  }
  return all;
}

template <class Cell>
void expect_truncated(const std::function<Tensor(Cell&, int, Tensor&)>& run) {
  isolated([&] {
    const auto usual = gradients_of_steps<Cell>(run, false);
    const auto again = gradients_of_steps<Cell>(run, true);
    for (size_t i = 0; i < usual.size(); ++i) EXPECT_TRUE(at::equal(usual[i], again[i])) << i;
  });
}

TEST(SecondRun, WhatHasNoHistoryGetsNone) {
  expect_truncated<AssignsState>(
      [](AssignsState& cell, int step, Tensor& state) { return call(cell, rows_at(step), state); });
  expect_truncated<ReturnsState>([](ReturnsState& cell, int step, Tensor& state) {
    const auto [y, detached, index, given] = call(cell, rows_at(step), state);
    EXPECT_FALSE(index.requires_grad());
    EXPECT_FALSE(given.requires_grad());
    EXPECT_TRUE(at::equal(given, state));
    state = detached;
    return y;
  });
}

// In place, of an argument that is computed from others.
TEST(SecondRun, ChangesOfArgumentsWithAHistoryAreRefused) {
  struct Adds : Layered {
    Tensor forward(const Tensor& x, Tensor h) { return layer(x) + h.add_(1); }
  };
  isolated([] {
    const auto net = std::make_shared<Adds>();
    const ActivationCheckpointing recompute({net});
    const Tensor h = rows_at(0).requires_grad_(true) * 2;
    EXPECT_THAT(message_of<ConfigError>([&] { call(net, rows_at(1), h); }),
                HasSubstr("Adds changed an argument of shape [4, 6] in place"));
  });
}

// The loss uses it: without recomputing it would have gradients.
TEST(SecondRun, ATensorLeftInAMemberIsNoResult) {
  struct Leaves : Layered {
    Tensor forward(const Tensor& x) { return left = layer(x); }
    Tensor left;
  };
  isolated([] {
    const auto net = std::make_shared<Leaves>();
    const ActivationCheckpointing recompute({net});
    const Tensor y = call(net, rows_at(0).requires_grad_(true));
    EXPECT_THAT(message_of<ConfigError>([&] { (y + net->left).sum().backward(); }),
                AllOf(HasSubstr("Leaves left elsewhere than in its results"),
                      HasSubstr("let it return that tensor")));
  });
}

void add_to(const std::vector<Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (Tensor parameter : parameters) parameter.add_(0.1);
}

Modules blocks_of(const Tower& tower) {
  Modules all;
  for (const auto& block : tower->blocks) all.push_back(block.ptr());
  return all;
}

const auto tells_of_change = [] {
  return AllOf(HasSubstr("BlockImpl was modified by an inplace operation since forward() began"),
               HasSubstr("parameter 'norm.weight'"));
};

TEST(SecondRun, ParametersThatChangedSinceTheFirst) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      const Tower net;
      const ActivationCheckpointing recompute(blocks_of(net));
      Ddp ddp(net, world);
      for (int step = 0; step < 2; ++step) {
        ddp.zero_grad();
        call(net, tower_input(world.rank(), step)).square().mean().backward();
        add_to(net->parameters());
      }
      const Tensor loss = call(net, tower_input(world.rank(), 2)).square().mean();
      for (const auto& block : net->blocks) add_to(block->parameters());
      EXPECT_THAT(message_of([&] { loss.backward(); }), tells_of_change());
    });
  }
}

TEST(SecondRun, ShardsThatChangedSinceTheFirst) {
  on_both([](World& world, FsdpOptions options) {
    const Tower net;
    const ActivationCheckpointing recompute(blocks_of(net));
    Fsdp fsdp(net, world.group(), with_units(options, blocks_of(net)));
    const auto loss_of_step = [&](int step) {
      return call(net, tower_input(world.rank(), step)).square().mean();
    };
    for (int step = 0; step < 2; ++step) {
      fsdp.zero_grad();
      loss_of_step(step).backward();
      add_to(fsdp.parameters());
    }
    const Tensor first = loss_of_step(2), second = loss_of_step(3);
    second.backward();
    for (const auto& shard : fsdp.shards()) {
      if (shard.name.starts_with("blocks")) add_to({shard.shard});
    }
    EXPECT_THAT(message_of([&] { first.backward(); }),
                HasSubstr("BlockImpl was modified by an inplace operation since forward() began"));
  });
}

TEST(SecondRun, ParametersThatForwardItselfChanges) {
  struct Follows : Layered {
    Tensor forward(const Tensor& x) {
      {
        const at::NoGradGuard no_grad;
        layer->bias.mul_(0.5);
      }
      return layer(x);
    }
  };
  isolated([] {
    const auto net = std::make_shared<Follows>();
    const ActivationCheckpointing recompute({net});
    const Tensor y = call(net, rows_at(0));
    EXPECT_THAT(message_of<ConfigError>([&] { y.sum().backward(); }),
                AllOf(HasSubstr("parameter 'layer.bias'"), HasSubstr("change buffers only")));
  });
}

enum class Counted { Values, Shape, Dtype, Nothing };
struct Counts : Layered {
  Tensor forward(const Tensor& x) {
    const Tensor y = layer(x);
    const bool is_odd = count++ % 2 == 1;
    if (!is_odd || what == Counted::Nothing) return y;
    if (what == Counted::Values) return y * 2;
    return what == Counted::Shape ? y.slice(0, 0, 3) : y.to(at::kFloat);
  }
  Counted what = Counted::Nothing;
  int count = 0;
};

TEST(SecondRun, OtherResultsAreRefusedByName) {
  isolated([] {
    const auto net = std::make_shared<Counts>();
    const ActivationCheckpointing recompute({net});
    const auto refused = [&](Counted what) {
      net->what = what;
      net->count = 0;
      return message_of<ConfigError>([&] { call(net, rows_at(0)).sum().backward(); });
    };
    EXPECT_EQ(refused(Counted::Nothing), "nothing");
    EXPECT_THAT(refused(Counted::Values),
                AllOf(HasSubstr("Counts made Double [4, 6], and other values when backward"),
                      HasSubstr("a counter or a state in a member")));
    EXPECT_THAT(refused(Counted::Shape),
                HasSubstr("made Double [4, 6], and Double [3, 6] when backward ran it again"));
    EXPECT_THAT(refused(Counted::Dtype), HasSubstr("and Float [4, 6] when backward"));
  });
}

// They are the same ones, and no reason to stop here.
TEST(SecondRun, ResultsThatAreNotFinite) {
  struct Divides : Layered {
    Tensor forward(const Tensor& x) { return layer(x) / (x * 0); }
  };
  isolated([] {
    const auto net = std::make_shared<Divides>();
    const ActivationCheckpointing recompute({net});
    call(net, rows_at(0)).sum().backward();
    EXPECT_TRUE(net->layer->weight.grad().defined());
  });
}

// Its forward() counts a version of the table, whether it scales rows or not.
TEST(SecondRun, ATableWithAMaximalNorm) {
  isolated([] {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 3).max_norm(0.5));
    const auto gradient = [&] {
      table->zero_grad();
      lockstep::call(table, at::arange(4)).square().sum().backward();
      return table->weight.grad().clone();
    };
    const Tensor plain = gradient();
    const ActivationCheckpointing recompute(Modules{table.ptr()});
    EXPECT_TRUE(at::allclose(gradient(), plain));
  });
}

// The sum of what cancels, or of nothing, is as large as its roundings.
TEST(SecondRun, ResultsThatAreNothingAreNotCompared) {
  struct Sums : Layered {
    std::tuple<Tensor, Tensor> forward(const Tensor& x) {
      const Tensor y = layer(x);
      const double rounding = 1e-17 * count++;
      return {(y.sum() - y.sum()) + rounding, y * 0 + rounding};
    }
    int count = 0;
  };
  isolated([] {
    const auto net = std::make_shared<Sums>();
    const ActivationCheckpointing recompute(Modules{net});
    const auto [sum, all] = lockstep::call(net, rows_at(1));
    (sum + all.sum()).backward();
    EXPECT_EQ(net->count, 2);
  });
}

}  // namespace
}  // namespace lockstep::test

// Fsdp with every kind of model and loop: gradients are those of Ddp, in every bit.
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/grad_scaler.h"
#include "parallel/fsdp/models.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

// Linear layers with a tanh between them, called as `order` says.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(std::vector<int> calls) : order(std::move(calls)) {
    torch::manual_seed(3);
    torch::nn::ModuleList list;
    for (int i = 0; i < 3; ++i) {
      layers.emplace_back(30, 30);
      list->push_back(layers.back());
    }
    register_module("layers", list);
  }
  at::Tensor forward(at::Tensor x) {
    for (const int i : order) x = torch::tanh(call(layers[i], x)) + x;
    return x;
  }
  std::vector<int> order;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Chain);

Chain chain(std::vector<int> order) { return Chain(std::move(order)); }

at::Tensor chain_input(int rank, int step = 0) {
  auto generator = at::detail::createCPUGenerator(1000 * step + rank);
  return at::randn({4, 30}, generator);
}

TEST(FsdpCases, AUnitThatIsCalledTwiceOrNotAtAllOrInAnotherOrder) {
  on_both([](World& world, const FsdpOptions& options) {
    for (const std::vector<int>& order :
         std::vector<std::vector<int>>{{0, 1, 0, 2}, {2, 0}, {2, 1, 0}, {1, 1, 1}}) {
      const Chain net = chain(order), usual = chain(order);
      expect_as_ddp(world, net, usual, with_units(options, units_of<torch::nn::LinearImpl>(*net)),
                    [&](Chain model, int step) {
                      return call(model, chain_input(world.rank(), step)).square().mean();
                    });
    }
    // Another order in each step.
    const Chain net = chain({0, 1, 2}), usual = chain({0, 1, 2});
    expect_as_ddp(world, net, usual, with_units(options, units_of<torch::nn::LinearImpl>(*net)),
                  [&](Chain model, int step) {
                    std::ranges::rotate(model->order, model->order.begin() + step % 2 + 1);
                    return call(model, chain_input(world.rank(), step)).square().mean();
                  });
  });
}

TEST(FsdpCases, TwoForwardsBeforeTheirBackwards) {
  on_both([](World& world, const FsdpOptions& options) {
    const Chain net = chain({0, 1, 2}), usual = chain({0, 1, 2});
    Fsdp fsdp(net, world.group(), with_units(options, units_of<torch::nn::LinearImpl>(*net)));
    Ddp ddp(usual, world.group());
    const auto losses = [&](const Chain& model, int step) {
      return call(model, chain_input(world.rank(), step)).square().mean();
    };
    const auto backward = [&](const Chain& model, auto& attached) {
      const at::Tensor first = losses(model, 0), second = losses(model, 1);
      {
        const auto hold = attached.hold();
        first.backward({}, /*retain_graph=*/true);
        second.backward();
      }
      first.backward();
    };
    backward(net, fsdp);
    backward(usual, ddp);
    expect_same_gradients(fsdp, usual, 0);
  });
}

struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(const at::Tensor& words) { weight = register_parameter("weight", words); }
  at::Tensor forward(const at::Tensor& x) { return torch::nn::functional::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

struct TiedWordsImpl : torch::nn::Module {
  TiedWordsImpl() {
    torch::manual_seed(4);
    words = register_module("words", torch::nn::Embedding(50, 30));
    middle = register_module("middle", torch::nn::Linear(30, 30));
    head = register_module("head", TiedHead(words->weight));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return call(head, torch::tanh(call(middle, call(words, tokens))));
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear middle{nullptr};
  TiedHead head{nullptr};
};
TORCH_MODULE(TiedWords);

TEST(FsdpCases, TiedParametersOfTwoUnitsBelongToWhatIsAroundThem) {
  on_both([](World& world, const FsdpOptions& options) {
    const TiedWords net, usual;
    const auto units = with_units(options, {net->words.ptr(), net->middle.ptr(), net->head.ptr()});
    expect_as_ddp(world, net, usual, units, [&](const TiedWords& model, int step) {
      const at::Tensor tokens = tower_input(world.rank(), step);
      return loss_of_scores(call(model, tokens), tokens);
    });
    Fsdp fsdp(TiedWords(), world.group());
    EXPECT_EQ(fsdp.units()[0].parameters.size(), 3U);
  });
}

TEST(FsdpCases, FrozenParametersAreDividedToo) {
  on_both([](World& world, const FsdpOptions& options) {
    const Tower net, usual;
    for (const Tower& model : {net, usual}) {
      model->words->weight.set_requires_grad(false);
      for (auto& parameter : model->blocks[0]->parameters()) parameter.set_requires_grad(false);
      model->blocks[1]->up->weight.set_requires_grad(false);
    }
    expect_as_ddp(
        world, net, usual, with_units(options, units_of<BlockImpl>(*net)),
        [&](const Tower& model, int step) { return tower_loss(model, world.rank(), step); });
  });
}

TEST(FsdpCases, AFrozenReferenceBesideTheModel) {
  on_both([](World& world, const FsdpOptions& options) {
    const Tower net, usual, reference(7), usual_reference(7);
    for (auto& parameter : reference->parameters()) parameter.set_requires_grad(false);
    Fsdp frozen(reference, world.group(), with_units(options, units_of<BlockImpl>(*reference)));
    expect_as_ddp(world, net, usual, with_units(options, units_of<BlockImpl>(*net)),
                  [&](const Tower& model, int step) {
                    const at::Tensor tokens = tower_input(world.rank(), step);
                    at::Tensor target;
                    {
                      const at::NoGradGuard no_grad;
                      target = model.get() == net.get() ? call(reference, tokens)
                                                        : call(usual_reference, tokens);
                    }
                    return (call(model, tokens) - target).square().mean();
                  });
  });
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    torch::manual_seed(5);
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(30, 30), torch::nn::BatchNorm1d(30),
                                        torch::nn::ReLU()));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
    head = register_module("head", torch::nn::Linear(30, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return head(call(dropout, call(layers, x))); }
  torch::nn::Sequential layers{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Normed);

TEST(FsdpCases, BuffersAndUnitsWithoutParameters) {
  on_both([](World& world, const FsdpOptions& options) {
    const Normed net, usual;
    const auto units = with_units(options, {net->layers->ptr(0), net->layers->ptr(1),
                                            net->layers->ptr(2), net->dropout.ptr()});
    expect_as_ddp(world, net, usual, units, [&](const Normed& model, int step) {
      torch::manual_seed(100 + step);
      return call(model, chain_input(world.rank(), step)).square().mean();
    });
    const auto buffers = net->buffers(), wanted = usual->buffers();
    for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(at::equal(buffers[i], wanted[i]));
  });
}

TEST(FsdpCases, CheckpointedUnitsHaveTheSameGradients) {
  on_both([](World& world, const FsdpOptions& options) {
    for (const bool frozen_inputs : {false, true}) {
      const Tower net, usual;
      for (const Tower& model : {net, usual}) {
        model->words->weight.set_requires_grad(!frozen_inputs);
      }
      const ActivationCheckpointing recompute(units_of<BlockImpl>(*net));
      expect_as_ddp(
          world, net, usual, with_units(options, units_of<BlockImpl>(*net)),
          [&](const Tower& model, int step) { return tower_loss(model, world.rank(), step); });
    }
    // A unit that is called twice, and units within what is checkpointed.
    const Chain net = chain({0, 1, 0, 2}), usual = chain({0, 1, 0, 2});
    const ActivationCheckpointing recompute(units_of<torch::nn::LinearImpl>(*net));
    Fsdp fsdp(net, world.group(), with_units(options, units_of<torch::nn::LinearImpl>(*net)));
    Ddp ddp(usual, world.group());
    call(net, chain_input(world.rank())).square().mean().backward();
    call(usual, chain_input(world.rank())).square().mean().backward();
    expect_same_gradients(fsdp, usual, 1e-6);
  });
}

// The model recomputes all of its blocks in one go.
struct OuterImpl : torch::nn::Module {
  OuterImpl() { tower = register_module("tower", Tower()); }
  at::Tensor forward(const at::Tensor& tokens) { return call(tower, tokens); }
  Tower tower{nullptr};
};
TORCH_MODULE(Outer);

TEST(FsdpCases, UnitsWithinACheckpointedModule) {
  on_both([](World& world, const FsdpOptions& options) {
    const Outer net, usual;
    const ActivationCheckpointing recompute({net->tower.ptr()});
    expect_as_ddp(
        world, net, usual, with_units(options, units_of<BlockImpl>(*net)),
        [&](const Outer& model, int step) { return tower_loss(model, world.rank(), step); });
  });
}

TEST(FsdpCases, EvaluationAndGenerationBetweenSteps) {
  on_both([](World& world, const FsdpOptions& options) {
    const Tower net, usual;
    Fsdp fsdp(net, world.group(), with_units(options, units_of<BlockImpl>(*net)));
    Ddp ddp(usual, world.group());
    FusedAdamW divided(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
    FusedAdamW whole(usual->parameters(), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 3; ++step) {
      fsdp.zero_grad();
      ddp.zero_grad();
      tower_loss(net, world.rank(), step).backward();
      tower_loss(usual, world.rank(), step).backward();
      divided.step();
      whole.step();
      const at::NoGradGuard no_grad;
      const at::Tensor tokens = tower_input(world.rank(), step);
      EXPECT_TRUE(at::equal(call(net, tokens), call(usual, tokens)));
      // Ranks generate different numbers of tokens.
      fsdp.unshard();
      for (int i = 0; i <= world.rank(); ++i) {
        EXPECT_TRUE(at::equal(call(net, tokens), call(usual, tokens)));
      }
      fsdp.reshard();
    }
  });
}

TEST(FsdpCases, AParameterThatNoRankReachesHasNoGradient) {
  on_both([](World& world, const FsdpOptions& options) {
    const Chain net = chain({0, 2}), usual = chain({0, 2});
    Fsdp fsdp(net, world.group(), with_units(options, units_of<torch::nn::LinearImpl>(*net)));
    call(net, chain_input(world.rank())).square().mean().backward();
    for (const auto& shard : fsdp.shards()) {
      EXPECT_EQ(shard.shard.grad().defined(), !shard.name.starts_with("layers.1")) << shard.name;
    }
  });
}

// Where ranks share a memory they need not call the same units.
TEST(FsdpCases, RanksThatCallOtherUnits) {
  spawn(2, [](World& world) {
    const std::vector<int> order = world.rank() == 0 ? std::vector{0, 1} : std::vector{0, 2};
    const Chain net = chain(order), usual = chain(order);
    expect_as_ddp(world, net, usual, with_units({}, units_of<torch::nn::LinearImpl>(*net)),
                  [&](const Chain& model, int step) {
                    return call(model, chain_input(world.rank(), step)).square().mean();
                  });
  });
  const auto errors = [](World& world) {
    const std::vector<int> order = world.rank() == 0 ? std::vector{0, 1} : std::vector{0, 2};
    const Chain net = chain(order);
    Fsdp fsdp(net, world.group(),
              with_units({.share_memory = false}, units_of<torch::nn::LinearImpl>(*net)));
    EXPECT_THAT(message_of<CommError>([&] { call(net, chain_input(0)); }),
                ::testing::HasSubstr("layers.2"));
  };
  spawn(2, errors);
}

TEST(FsdpCases, ComputesInANarrowDtypeFromWideShards) {
  on_both([](World& world, const FsdpOptions& options) {
    FsdpOptions narrow = options;
    narrow.param_dtype = at::kBFloat16;
    narrow.reduce_dtype = at::kFloat;
    const Tower net;
    Tower usual;
    Fsdp fsdp(net, world.group(), with_units(narrow, units_of<BlockImpl>(*net)));
    torch::optim::SGD divided(fsdp.parameters(), 0.1);
    // By hand: bfloat16 copies of float32 parameters, whose gradients are averaged in float32.
    std::vector<at::Tensor> masters;
    for (auto& parameter : usual->parameters()) masters.push_back(parameter.detach().clone());
    usual->to(at::kBFloat16);
    for (int step = 0; step < 3; ++step) {
      fsdp.zero_grad();
      const at::Tensor loss = tower_loss(net, world.rank(), step);
      EXPECT_EQ(net->head->weight.scalar_type(), at::kBFloat16);
      loss.backward();
      const auto parameters = usual->parameters();
      usual->zero_grad();
      tower_loss(usual, world.rank(), step).backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor gradient = parameters[i].grad().to(at::kFloat);
        world.group().all_reduce(gradient, ReduceOp::Average).wait();
        masters[i].sub_(gradient, 0.1);
        const at::NoGradGuard no_grad;
        at::Tensor(parameters[i]).copy_(masters[i]);
      }
      divided.step();
    }
    const auto shards = fsdp.shards();
    for (size_t i = 0; i < shards.size(); ++i) {
      EXPECT_EQ(shards[i].shard.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(shards[i].shard, part_of_shard(masters[i], shards[i])))
          << shards[i].name;
    }
  });
}

TEST(FsdpCases, AnOverflowOnOneRankIsOneOnAll) {
  on_both([](World& world, const FsdpOptions& options) {
    const Tower net;
    Fsdp fsdp(net, world.group(), with_units(options, units_of<BlockImpl>(*net)));
    torch::optim::SGD divided(fsdp.parameters(), 0.1);
    GradScaler scaler(world.group());
    scaler.scale(tower_loss(net, world.rank(), 0)).backward();
    if (world.rank() == 1) {
      for (const auto& leaf : fsdp.parameters()) {
        if (leaf.numel() > 0) leaf.grad()[0] = std::numeric_limits<float>::infinity();
      }
    }
    EXPECT_FALSE(scaler.step(divided));
    scaler.update();
    EXPECT_EQ(scaler.factor(), 32768);
  });
}

TEST(FsdpCases, UnitsBySizeAndByTypeName) {
  spawn(2, [](World& world) {
    const auto names = [&](const FsdpOptions& options, const Tower& net) {
      Fsdp fsdp(net, world.group(), options);
      std::vector<std::string> found;
      for (const auto& unit : fsdp.units()) found.push_back(unit.name);
      return found;
    };
    using ::testing::ElementsAre;
    const Tower net;
    EXPECT_THAT(names({.units = units_of(*net, {"Block"})}, net),
                ElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
    // A block has 6,680 parameters, its two linear layers 3,280 and 3,240.
    EXPECT_THAT(names({.min_num_params = 6000}, Tower()),
                ElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
    EXPECT_THAT(message_of<ConfigError>([&] { units_of(*net, std::vector<std::string>{"Blok"}); }),
                ::testing::HasSubstr("no module of type 'Blok' for a unit; there are Block, "));
  });
}

TEST(FsdpCases, UnitsBySizeAreNoPartsOfLibtorchsModules) {
  spawn(2, [](World& world) {
    torch::nn::TransformerEncoderLayer layer(torch::nn::TransformerEncoderLayerOptions(8, 2));
    const torch::nn::Sequential net(layer, torch::nn::Linear(8, 1));
    const Fsdp fsdp(net, world.group(), {.min_num_params = 1});
    std::vector<std::string> names;
    for (const auto& unit : fsdp.units()) names.push_back(unit.name);
    EXPECT_THAT(names, ::testing::ElementsAre("", "0", "1"));
    lockstep::call(net, torch::randn({3, 2, 8})).sum().backward();
  });
}

// Lists have no forward() that could be called: what is in them belongs to the module around.
TEST(FsdpCases, UnitsBySizeAreNoLists) {
  struct ListedImpl : torch::nn::Module {
    ListedImpl() {
      for (int i = 0; i < 4; ++i) list->push_back(torch::nn::Linear(10, 10));
      register_module("list", list);
      factors->append(torch::ones({10, 10}));
      register_module("factors", factors);
    }
    at::Tensor forward(at::Tensor x) {
      for (const auto& layer : *list) x = layer->as<torch::nn::Linear>()->forward(x);
      return x.mm(factors[0]);
    }
    torch::nn::ModuleList list;
    torch::nn::ParameterList factors;
  };
  spawn(2, [](World& world) {
    const auto model = std::make_shared<ListedImpl>();
    const torch::nn::Sequential net(model, torch::nn::Linear(10, 1));
    {
      // A layer has 110 parameters, the list 440, the factors 100.
      const Fsdp fsdp(net, world.group(), {.min_num_params = 300});
      std::vector<int64_t> sizes;
      for (const auto& unit : fsdp.units()) sizes.push_back(unit.numel);
      EXPECT_THAT(sizes, ::testing::ElementsAre(11, 540));
      lockstep::call(net, torch::ones({2, 10})).sum().backward();
      EXPECT_TRUE(fsdp.parameters()[0].grad().defined());
    }
    EXPECT_THAT(
        message_of<ConfigError>([&] { Fsdp(net, world.group(), {.units = {model->list.ptr()}}); }),
        ::testing::HasSubstr("FsdpOptions::units has '0.list', a "
                             "torch::nn::ModuleListImpl, which has no forward()"));
    struct OwnList : torch::nn::ModuleListImpl {
      at::Tensor forward(const at::Tensor& x) { return x; }
    };
    const auto own = std::make_shared<OwnList>();
    own->push_back(torch::nn::Linear(10, 10));
    EXPECT_NO_THROW(Fsdp(torch::nn::Sequential(own), world.group(), {.units = {own}}));
  });
}

TEST(FsdpCases, WhatCannotBeIsRefusedOnAllRanks) {
  spawn(2, [](World& world) {
    const auto refused = [&](const auto& attach) { return message_of<ConfigError>(attach); };
    const Group& group = world.group();
    const Tower net;
    const auto with = [&](FsdpOptions options) {
      return refused([&] { Fsdp(Tower(), group, std::move(options)); });
    };
    using ::testing::HasSubstr;
    EXPECT_THAT(with({.units = {net->head.ptr()}}), HasSubstr("not part of the model"));
    EXPECT_THAT(with({.shard_ranks = 3}), HasSubstr("shard_ranks = 3 for 2 ranks"));
    EXPECT_THAT(with({.param_dtype = at::kInt}), HasSubstr("param_dtype = Int"));
    EXPECT_THAT(with({.max_unsharded_units = world.rank()}), HasSubstr("options differ"));
    {
      Ddp ddp(net, group);
      EXPECT_THAT(refused([&] { Fsdp(net, group); }),
                  HasSubstr("belongs to a Ddp or another Fsdp"));
    }
    {
      const Tower other;
      Fsdp fsdp(other, group);
      EXPECT_THAT(refused([&] { Ddp(other, group); }), HasSubstr("belongs to"));
    }
    torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(8, 4).sparse(true));
    EXPECT_THAT(refused([&] { Fsdp(sparse, group); }), HasSubstr("sparse gradients"));
    // On one rank only: all throw.
    const Tower thawed;
    thawed->blocks[0]->up->weight.set_requires_grad(false);
    Fsdp fsdp(thawed, group, {.units = units_of<BlockImpl>(*thawed)});
    if (world.rank() == 1) thawed->blocks[0]->up->weight.set_requires_grad(true);
    EXPECT_THAT(refused([&] { tower_loss(thawed, world.rank(), 0).backward(); }),
                HasSubstr("rank 1: parameter 'blocks.0.up.weight' was unfrozen after Fsdp"));
  });
}

}  // namespace
}  // namespace lockstep::test

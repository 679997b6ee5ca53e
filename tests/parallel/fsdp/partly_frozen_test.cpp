// Units of which backward still needs parameters when the last trainable one has its gradient.
#include <optional>

#include "lockstep/parallel/activation_checkpointing.h"
#include "parallel/fsdp/models.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

constexpr int64_t kUnitWidth = 24;

at::Tensor frozen_rows(int rank, int step = 0) {
  auto generator = at::detail::createCPUGenerator(1000 * step + rank);
  return at::randn({4, kUnitWidth}, generator);
}

void freeze_layer(const torch::nn::Linear& layer) {
  for (auto& parameter : layer->parameters()) parameter.set_requires_grad(false);
}

// The frozen layer is called before the low-rank part, so its backward comes after.
struct LoraImpl : torch::nn::Module {
  LoraImpl() {
    base = register_module("base", torch::nn::Linear(kUnitWidth, kUnitWidth));
    freeze_layer(base);
    down = register_parameter("down", 0.3 * torch::randn({kUnitWidth, 2}));
    up = register_parameter("up", 0.3 * torch::randn({2, kUnitWidth}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = base(x);
    return torch::tanh(y + x.matmul(down).matmul(up));
  }
  torch::nn::Linear base{nullptr};
  at::Tensor down, up;
};
TORCH_MODULE(Lora);

struct FrozenFirstImpl : torch::nn::Module {
  FrozenFirstImpl() {
    first = register_module("first", torch::nn::Linear(kUnitWidth, kUnitWidth));
    second = register_module("second", torch::nn::Linear(kUnitWidth, kUnitWidth));
    freeze_layer(first);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(FrozenFirst);

// All trainable, but the gradient of x goes through detached weights.
struct DetachedImpl : torch::nn::Module {
  DetachedImpl() {
    weight = register_parameter("weight", 0.3 * torch::randn({kUnitWidth, kUnitWidth}));
    out = register_module("out", torch::nn::Linear(kUnitWidth, kUnitWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor past = x.matmul(weight.detach());
    return out(past + torch::tanh(x.detach().matmul(weight)));
  }
  at::Tensor weight;
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Detached);

struct FrozenImpl : torch::nn::Module {
  FrozenImpl() {
    layer = register_module("layer", torch::nn::Linear(kUnitWidth, kUnitWidth));
    freeze_layer(layer);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(layer(x)); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Frozen);

// Units between two layers, called as `order` says.
template <class Unit>
struct StackImpl : torch::nn::Module {
  explicit StackImpl(std::vector<int> calls = {0, 1, 2}, bool first = true)
      : order(std::move(calls)), has_first(first) {
    torch::manual_seed(3);
    in = register_module("in", torch::nn::Linear(kUnitWidth, kUnitWidth));
    torch::nn::ModuleList list;
    for (int i = 0; i < 3; ++i) {
      units.emplace_back();
      list->push_back(units.back());
    }
    register_module("units", list);
    out = register_module("out", torch::nn::Linear(kUnitWidth, 1));
  }
  at::Tensor forward(at::Tensor x) {
    if (has_first) x = in(x);
    for (const int i : order) {
      if (look) look(i, x);
      x = call(units[i], x);
    }
    return out(x);
  }
  std::vector<int> order;
  bool has_first;
  std::function<void(int unit, const at::Tensor& input)> look;
  torch::nn::Linear in{nullptr}, out{nullptr};
  std::vector<Unit> units;
};
template <class Unit>
using Stack = torch::nn::ModuleHolder<StackImpl<Unit>>;

// Gathered and shared, and each way to divide.
void for_each_way(const std::function<void(World&, const FsdpOptions&)>& body) {
  using parallel::BackwardPrefetch;
  for (const FsdpOptions& options : std::vector<FsdpOptions>{
           {},
           {.share_memory = false},
           {.backward_prefetch = BackwardPrefetch::After, .share_memory = false},
           {.reshard_after_forward = false, .share_memory = false},
           {.sharding = Sharding::Gradients, .share_memory = false},
           {.sharding = Sharding::None}}) {
    spawn(2, [&](World& world) { body(world, options); });
  }
}

template <class Unit>
void expect_stack_as_ddp(World& world, const FsdpOptions& options, std::vector<int> order,
                         bool has_first = true) {
  const Stack<Unit> net(order, has_first), usual(order, has_first);
  expect_as_ddp(world, net, usual,
                with_units(options, units_of<typename Unit::ContainedType>(*net)),
                [&](const Stack<Unit>& model, int step) {
                  return call(model, frozen_rows(world.rank(), step)).square().mean();
                });
}

template <class Unit>
void expect_all_stacks_as_ddp() {
  for_each_way([](World& world, const FsdpOptions& options) {
    expect_stack_as_ddp<Unit>(world, options, {0, 1, 2});
    expect_stack_as_ddp<Unit>(world, options, {0, 1, 0, 0, 2});
    expect_stack_as_ddp<Unit>(world, options, {2, 0}, /*has_first=*/false);
  });
}

TEST(FsdpPartlyFrozen, LowRankUpdatesOfFrozenLayers) { expect_all_stacks_as_ddp<Lora>(); }
TEST(FsdpPartlyFrozen, AFrozenLayerBeforeATrainableOne) { expect_all_stacks_as_ddp<FrozenFirst>(); }
TEST(FsdpPartlyFrozen, DetachedWeights) { expect_all_stacks_as_ddp<Detached>(); }
TEST(FsdpPartlyFrozen, UnitsThatAreAllFrozen) { expect_all_stacks_as_ddp<Frozen>(); }

TEST(FsdpPartlyFrozen, TwoForwardsBeforeTheirBackwardsAndGradientsThatAreHeld) {
  for_each_way([](World& world, const FsdpOptions& options) {
    const Stack<Lora> net, usual;
    Fsdp fsdp(net, world.group(), with_units(options, units_of<LoraImpl>(*net)));
    Ddp ddp(usual, world.group());
    const auto backward = [&](const Stack<Lora>& model, auto& attached) {
      const at::Tensor first = call(model, frozen_rows(world.rank(), 0)).square().mean();
      const at::Tensor second = call(model, frozen_rows(world.rank(), 1)).square().mean();
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

TEST(FsdpPartlyFrozen, LanesAndCheckpointedUnits) {
  for_each_way([](World& world, const FsdpOptions& given) {
    for (const bool has_first : {true, false}) {
      const std::vector<int> order = {0, 1, 2};
      const Stack<Lora> net(order, has_first), usual(order, has_first);
      const ActivationCheckpointing recompute(units_of<LoraImpl>(*net));
      FsdpOptions options = with_units(given, units_of<LoraImpl>(*net));
      options.lanes = 4;
      Fsdp fsdp(net, world.group(), options);
      Ddp ddp(usual, world.group(), {.lanes = 4});
      const auto backward = [&](const Stack<Lora>& model, auto& attached) {
        for (const Lane lane : attached.lanes(StepKey{.seed = 1, .step = 0})) {
          call(model, frozen_rows(lane.index)).square().mean().backward();
        }
      };
      backward(net, fsdp);
      backward(usual, ddp);
      expect_same_gradients(fsdp, usual, 0);
    }
  });
}

// What all blocks look at reaches each of them through an object whose tensors call() cannot see.
struct Context {
  at::Tensor memory;
};
struct CrossImpl : torch::nn::Module {
  CrossImpl() {
    keys = register_module("keys", torch::nn::Linear(kUnitWidth, kUnitWidth));
    query = register_module("query", torch::nn::Linear(kUnitWidth, kUnitWidth));
    freeze_layer(keys);
  }
  at::Tensor forward(const at::Tensor& x, const Context& context) {
    const at::Tensor k = keys(context.memory);
    return x + torch::tanh(query(x)) * k;
  }
  torch::nn::Linear keys{nullptr}, query{nullptr};
};
TORCH_MODULE(Cross);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    torch::manual_seed(3);
    encoder = register_module("encoder", torch::nn::Linear(kUnitWidth, kUnitWidth));
    torch::nn::ModuleList list;
    for (int i = 0; i < 2; ++i) {
      blocks.emplace_back();
      list->push_back(blocks.back());
    }
    register_module("blocks", list);
  }
  at::Tensor forward(at::Tensor x) {
    const Context context{encoder(x)};
    for (auto& block : blocks) x = call(block, x, context);
    return x;
  }
  torch::nn::Linear encoder{nullptr};
  std::vector<Cross> blocks;
};
TORCH_MODULE(Decoder);

TEST(FsdpPartlyFrozen, ATensorThatIsNoArgument) {
  for_each_way([](World& world, const FsdpOptions& options) {
    const Decoder net, usual;
    expect_as_ddp(world, net, usual, with_units(options, units_of<CrossImpl>(*net)),
                  [&](const Decoder& model, int step) {
                    return call(model, frozen_rows(world.rank(), step)).square().mean();
                  });
  });
}

// A frozen layer of a unit on top of a unit within it, the path of whose gradient ends there.
struct EnclosingImpl : torch::nn::Module {
  EnclosingImpl() {
    inner = register_module("inner", torch::nn::Linear(kUnitWidth, kUnitWidth));
    top = register_module("top", torch::nn::Linear(kUnitWidth, kUnitWidth));
    side = register_module("side", torch::nn::Linear(kUnitWidth, kUnitWidth));
    freeze_layer(top);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = top(torch::tanh(call(inner, x.detach())));
    return y + side(x);
  }
  torch::nn::Linear inner{nullptr}, top{nullptr}, side{nullptr};
};
TORCH_MODULE(Enclosing);

TEST(FsdpPartlyFrozen, AUnitWithinAUnit) {
  for_each_way([](World& world, const FsdpOptions& options) {
    const Stack<Enclosing> net, usual;
    auto units = units_of<EnclosingImpl>(*net);
    for (auto& unit : net->units) units.push_back(unit->inner.ptr());
    expect_as_ddp(world, net, usual, with_units(options, units),
                  [&](const Stack<Enclosing>& model, int step) {
                    return call(model, frozen_rows(world.rank(), step)).square().mean();
                  });
  });
}

// Not kept any longer than that: when backward comes to what a unit was given, the unit's
// parameters have no memory.
template <class Unit>
void expect_closed_at_inputs(World& world, const FsdpOptions& options, bool recomputes) {
  Stack<Unit> net;
  const auto units = units_of<typename Unit::ContainedType>(*net);
  std::optional<ActivationCheckpointing> recompute;
  if (recomputes) recompute.emplace(units);
  Fsdp fsdp(net, world.group(), with_units(options, units));
  int count = 0;
  net->look = [&](int unit, const at::Tensor& input) {
    input.register_hook([&, unit](const at::Tensor&) {
      ++count;
      const at::Tensor parameter = net->units[unit]->parameters().front();
      EXPECT_THAT(message_of<c10::Error>([&] { parameter.sum(); }),
                  ::testing::HasSubstr("has no memory outside of its unit"));
    });
  };
  call(net, frozen_rows(world.rank())).square().mean().backward();
  EXPECT_EQ(count, 3);
}

TEST(FsdpPartlyFrozen, ParametersAreFreedWhenTheGradientsOfTheUnitsInputsAreKnown) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      for (const bool recomputes : {false, true}) {
        expect_closed_at_inputs<Lora>(world, {.share_memory = share}, recomputes);
        expect_closed_at_inputs<FrozenFirst>(world, {.share_memory = share}, recomputes);
        expect_closed_at_inputs<Detached>(world, {.share_memory = share}, recomputes);
        expect_closed_at_inputs<Frozen>(world, {.share_memory = share}, recomputes);
        expect_closed_at_inputs<Enclosing>(world, {.share_memory = share}, recomputes);
      }
      expect_closed_at_inputs<Frozen>(
          world, {.sharding = Sharding::Gradients, .share_memory = share}, false);
    });
  }
}

// A view of what a unit computes, which the model then changes in place.
struct ViewedImpl : torch::nn::Module {
  ViewedImpl() { layer = register_module("layer", torch::nn::Linear(kUnitWidth, kUnitWidth)); }
  at::Tensor forward(const at::Tensor& x) { return layer(torch::tanh(x)).view({2, 2, kUnitWidth}); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Viewed);

struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() {
    torch::manual_seed(3);
    in = register_module("in", torch::nn::Linear(kUnitWidth, kUnitWidth));
    unit = register_module("unit", Viewed());
    out = register_module("out", torch::nn::Linear(kUnitWidth, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return out(call(unit, in(x)).add_(1)); }
  Viewed unit{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(InPlace);

TEST(FsdpCases, AViewThatAUnitReturnsMayBeChangedInPlace) {
  for_each_way([](World& world, const FsdpOptions& options) {
    const InPlace net, usual;
    expect_as_ddp(world, net, usual, with_units(options, {net->unit.ptr()}),
                  [&](const InPlace& model, int step) {
                    return call(model, frozen_rows(world.rank(), step)).square().mean();
                  });
  });
}

// Gradients go through it, to the model before it, and its shards follow that one's.
TEST(FsdpFrozenModel, IsUpdatedAfterGradientsWentThroughIt) {
  on_both([](World& world, const FsdpOptions& options) {
    const auto train = [&](const auto& attach) {
      const Tower net;
      torch::nn::Linear teacher(TowerImpl::kWords, 8);
      {
        const at::NoGradGuard no_grad;
        for (auto& parameter : teacher->parameters()) parameter.fill_(0.25);
      }
      for (auto& parameter : teacher->parameters()) parameter.set_requires_grad(false);
      auto [student, weights, frozen, targets] = attach(net, teacher);
      torch::optim::SGD sgd(weights, 0.1);
      std::vector<at::Tensor> losses;
      for (int step = 0; step < 3; ++step) {
        student->zero_grad();
        const at::Tensor scores = call(net, tower_input(world.rank(), step));
        losses.push_back(torch::tanh(call(teacher, scores)).square().mean());
        losses.back().backward();
        sgd.step();
        const at::NoGradGuard no_grad;
        for (auto& target : targets) target.mul_(0.5);
      }
      return at::stack(losses);
    };
    const at::Tensor losses = train([&](const Tower& net, torch::nn::Linear& teacher) {
      auto student = std::make_unique<Fsdp>(net, world.group(),
                                            with_units(options, units_of<BlockImpl>(*net)));
      auto frozen = std::make_unique<Fsdp>(teacher, world.group(), options);
      auto weights = student->parameters(), targets = frozen->parameters();
      return std::tuple(std::move(student), weights, std::move(frozen), targets);
    });
    const at::Tensor usual = train([&](const Tower& net, torch::nn::Linear& teacher) {
      auto ddp = std::make_unique<Ddp>(net, world.group());
      return std::tuple(std::move(ddp), net->parameters(), 0, teacher->parameters());
    });
    EXPECT_TRUE(at::equal(losses, usual)) << losses << usual;
  });
}

// Parameters that are frozen when the Fsdp is made are cut by themselves.
TEST(FsdpFrozenModel, FollowsOneOfWhichTheSameWasFrozenWhenItWasMade) {
  on_both([](World& world, const FsdpOptions& options) {
    const Lora online, target, all_frozen;
    for (auto& parameter : all_frozen->parameters()) parameter.set_requires_grad(false);
    Fsdp leads(online, world.group(), options), follows(target, world.group(), options);
    const Fsdp other(all_frozen, world.group(), options);
    for (auto& parameter : target->parameters()) parameter.set_requires_grad(false);

    const auto cuts = [](const Fsdp& fsdp) {
      std::vector<std::pair<int64_t, int64_t>> found;
      for (const auto& part : fsdp.shards()) found.emplace_back(part.begin, part.shard.numel());
      return found;
    };
    EXPECT_EQ(cuts(follows), cuts(leads));
    EXPECT_NE(cuts(other), cuts(leads));

    const auto whole = [](Fsdp& fsdp, const Lora& net) {
      std::vector<at::Tensor> values;
      fsdp.unshard();
      for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
      fsdp.reshard();
      return values;
    };
    const at::NoGradGuard no_grad;
    const auto from = whole(leads, online), before = whole(follows, target);
    for (size_t i = 0; i < from.size(); ++i)
      follows.parameters()[i].lerp_(leads.parameters()[i], 0.25);
    const auto after = whole(follows, target);
    for (size_t i = 0; i < from.size(); ++i) {
      EXPECT_TRUE(at::equal(after[i], before[i].lerp(from[i], 0.25)));
    }
  });
}

}  // namespace
}  // namespace lockstep::test

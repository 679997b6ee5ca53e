// What hooks carry from pass to pass: an overflow, a change of the loss scale, other buckets and a
// foreign checkpoint do not harm it.
#include <limits>

#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using parallel::CastOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;
using HookMaker = std::function<std::shared_ptr<CommHook>()>;

const std::vector<std::pair<std::string, HookMaker>>& makers_of_hooks() {
  static const std::vector<std::pair<std::string, HookMaker>> all{
      {"bfloat16",
       [] {
         return std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true});
       }},
      {"float16",
       [] { return std::make_shared<CastHook>(at::kHalf, CastOptions{.error_feedback = true}); }},
      {"power_sgd",
       [] {
         return std::make_shared<PowerSgd>(
             PowerSgdOptions{.rank = 1, .start_iteration = 1, .least_compression = 1.1});
       }},
      {"power_sgd from new starts",
       [] {
         return std::make_shared<PowerSgd>(PowerSgdOptions{
             .rank = 2, .start_iteration = 1, .warm_start = false, .least_compression = 1.1});
       }},
      {"top_k", [] { return std::make_shared<TopK>(TopKOptions{.fraction = 0.1}); }},
      {"local_sgd", [] { return std::make_shared<LocalSgd>(); }},
  };
  return all;
}

// The gradients of each pass of (batch, loss scale), divided by that; an infinite one overflows on
// rank 1.
std::vector<std::vector<at::Tensor>> gradients_of_passes(
    World& world, const HookMaker& make, const std::vector<std::pair<int, double>>& passes,
    std::vector<int64_t> bucket_bytes = {64}) {
  Mlp net;
  const auto hook = make();
  Ddp ddp(net, world.group(), {.bucket_bytes = std::move(bucket_bytes), .hook = hook});
  std::vector<std::vector<at::Tensor>> all;
  double before = 1;
  for (const auto& [batch, factor] : passes) {
    const double scale = std::isfinite(factor) ? factor : before;
    if (scale != before) hook->rescale(scale / before);
    before = scale;
    ddp.zero_grad();
    // In one bucket of several.
    const bool overflows = !std::isfinite(factor) && world.rank() == 1;
    const auto spike = [&](const at::Tensor& g) { return overflows ? g * factor : g; };
    const unsigned id = net.second->bias.register_hook(spike);
    (square_loss(net, world.rank(), batch) * scale).backward();
    net.second->bias.remove_hook(id);
    all.emplace_back();
    for (const auto& gradient : gradients(net)) all.back().push_back(gradient / scale);
  }
  return all;
}

TEST(HookState, AnOverflowLeavesItAsItWasBeforeThePass) {
  spawn(3, [](World& world) {
    for (const auto& [name, make] : makers_of_hooks()) {
      if (name == "power_sgd from new starts") continue;  // of which each pass has another
      SCOPED_TRACE(name);
      const auto without = gradients_of_passes(world, make, {{0, 1}, {1, 1}, {3, 1}, {4, 1}});
      const auto with =
          gradients_of_passes(world, make, {{0, 1}, {1, 1}, {2, INFINITY}, {3, 1}, {4, 1}});
      EXPECT_FALSE(at::isfinite(with[2][3]).all().item<bool>());
      expect_equal(with[1], without[1]);
      expect_equal(with[3], without[2]);
      expect_equal(with[4], without[3]);
    }
  });
}

TEST(HookState, APassThatIsRefusedLeavesItAsItWasBefore) {
  const auto refused = [](Mlp& net, int rank, Unused unused) {
    if (unused == Unused::Error) return net.second(net.first(input(rank, 3))).sum().backward();
    if (rank == 1) net.third->bias.mutable_grad() = at::ones({3}, at::kDouble);
    square_loss(net, rank, 3).backward();
  };
  spawn(2, [&](World& world) {
    for (const auto& [name, make] : makers_of_hooks()) {
      for (const auto unused : {Unused::Zero, Unused::Error}) {
        SCOPED_TRACE(name);
        Mlp net;
        const auto hook = make();
        Ddp ddp(net, world.group(), {.bucket_bytes = {64}, .unused = unused, .hook = hook});
        for (int pass = 0; pass < 3; ++pass) square_loss(net, world.rank(), pass).backward();
        auto before = hook->state();
        for (auto& [piece, tensor] : before) tensor = tensor.clone();
        ddp.zero_grad();
        EXPECT_THROW(refused(net, world.rank(), unused), ConfigError);
        for (const auto& [piece, tensor] : hook->state()) {
          if (piece == "iteration") continue;
          EXPECT_TRUE(at::equal(tensor, before.at(piece))) << piece;
        }
      }
    }
  });
}

TEST(HookState, ALastBucketWithoutElementsWaitsForTheOthers) {
  spawn(2, [](World& world) {
    for (const auto& [name, make] : makers_of_hooks()) {
      SCOPED_TRACE(name);
      Mlp net;
      const auto nothing = net.register_parameter("nothing", torch::zeros({0, 4}));
      const auto hook = make();
      Ddp ddp(net, world.group(), {.bucket_bytes = {1}, .hook = hook});
      const auto pass = [&](int step, float scale) {
        ddp.zero_grad();
        // The sum of nothing comes first in forward, so its gradient is the last.
        const auto x = input(world.rank(), step) + nothing.sum();
        (net.forward(x).square().mean() * scale).backward();
      };
      for (int step = 0; step < 3; ++step) pass(step, 1);
      std::map<std::string, at::Tensor> before;
      for (const auto& [key, tensor] : hook->state()) before[key] = tensor.clone();
      pass(3, std::numeric_limits<float>::infinity());
      for (const auto& [key, tensor] : hook->state()) {
        if (key == "iteration") continue;
        EXPECT_TRUE(at::equal(tensor, before.at(key))) << key;
      }
    }
  });
}

// Powers of two change no digit (but a float16's, whose exponents are few).
TEST(HookState, FollowsTheLossScale) {
  spawn(2, [](World& world) {
    for (const auto& [name, make] : makers_of_hooks()) {
      SCOPED_TRACE(name);
      const auto plain = gradients_of_passes(world, make, {{0, 1}, {1, 1}, {2, 1}, {3, 1}});
      const auto scaled = gradients_of_passes(world, make, {{0, 16}, {1, 16}, {2, 8}, {3, 32}});
      for (size_t pass = 0; pass < plain.size(); ++pass) {
        if (name != "float16") {
          expect_equal(scaled[pass], plain[pass]);
          continue;
        }
        for (size_t i = 0; i < plain[pass].size(); ++i) {
          EXPECT_TRUE(at::allclose(scaled[pass][i], plain[pass][i], 1e-2, 1e-5));
        }
      }
    }
  });
}

TEST(HookState, IsToldOfTheLossScaleByTheScaler) {
  class Listening : public CastHook {
   public:
    Listening() : CastHook(at::kBFloat16) {}
    void rescale(double factor) override { factors.push_back(factor); }
    std::vector<double> factors;
  };
  class Unprepared : public CastHook {
   public:
    Unprepared() : CastHook(at::kBFloat16, CastOptions{.error_feedback = true}) {}
    void rescale(double factor) override { CommHook::rescale(factor); }
  };
  spawn(2, [](World& world) {
    const auto hook = std::make_shared<Listening>();
    const auto unprepared = std::make_shared<Unprepared>();
    Mlp net, other;
    Ddp ddp(net, world.group(), {.hook = hook}), second(other, world.group(), {.hook = unprepared});
    torch::optim::SGD sgd(net.parameters(), 0.1), other_sgd(other.parameters(), 0.1);
    GradScaler scaler(world.group(), {.init_scale = 64, .growth_interval = 2});
    for (int step = 0; step < 5; ++step) {
      sgd.zero_grad();
      const double spike = step == 2 && world.rank() == 1 ? INFINITY : 1;
      scaler.scale(square_loss(net, world.rank(), step) * spike).backward();
      scaler.step(sgd);
      scaler.update();
    }
    EXPECT_THAT(hook->factors, ::testing::ElementsAre(2, 0.5, 2));
    square_loss(other, world.rank()).backward();
    scaler.scale(square_loss(other, world.rank()) * INFINITY).backward();
    scaler.step(other_sgd);
    EXPECT_THROW(scaler.update(), ConfigError);
  });
}

// What other ranks left to send stays for ranks that come later, which have the new scale.
TEST(HookState, FollowsTheLossScaleInAGroupOfOne) {
  spawn(1, [](World& world) {
    for (const int refreshes : {0, 1}) {
      const auto hook =
          std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true});
      const at::Tensor kept = at::arange(64.0).view({8, 8}).to(at::kFloat);
      Mlp net, plain;
      Ddp ddp(net, world.group(), {.hook = hook});
      if (refreshes > 0) ddp.refresh();
      hook->restore({{"second.weight", kept}});
      torch::optim::SGD sgd(net.parameters(), 0.1);
      GradScaler scaler(world.group(), {.init_scale = 64, .growth_interval = 1});
      scaler.scale(square_loss(net, 0)).backward();
      scaler.unscale_(sgd);
      scaler.update();
      EXPECT_TRUE(at::equal(hook->state().at("second.weight"), kept * 2));
      square_loss(plain, 0).backward();
      expect_equal(gradients(net), gradients(plain));
    }
  });
}

TEST(HookState, BucketsChangeNoBit) {
  spawn(2, [](World& world) {
    for (const auto& [name, make] : makers_of_hooks()) {
      SCOPED_TRACE(name);
      const std::vector<std::pair<int, double>> passes{{0, 1}, {1, 1}, {2, 1}, {3, 1}};
      const auto one = gradients_of_passes(world, make, passes, {1 << 20});
      for (const int64_t bytes : {1, 64, 300}) {
        const auto many = gradients_of_passes(world, make, passes, {bytes});
        for (size_t pass = 0; pass < one.size(); ++pass) expect_equal(many[pass], one[pass]);
      }
    }
  });
}

// `change` damages a state that is otherwise good.
void expect_refused(World& world, const HookMaker& make, const std::string& what,
                    const std::function<void(parallel::Tensors&)>& change) {
  SCOPED_TRACE(what);
  Mlp net;
  const auto hook = make();
  Ddp ddp(net, world.group(), {.hook = hook});
  for (int pass = 0; pass < 3; ++pass) square_loss(net, world.rank(), pass).backward();
  parallel::Tensors good;
  for (const auto& [name, tensor] : hook->state()) good[name] = tensor.clone();
  auto bad = good;
  change(bad);
  try {
    hook->restore(bad);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(hook->name()), HasSubstr(what)));
  }
  const auto after = hook->state();
  ASSERT_EQ(after.size(), good.size());
  for (const auto& [name, tensor] : good) EXPECT_TRUE(at::equal(after.at(name), tensor)) << name;
  hook->restore(good);

  // A state that comes before its Ddp is looked at when that does; one rank's is refused by all.
  const auto early = make();
  bool refused = false;
  try {
    early->restore(world.rank() == 1 ? bad : good);
  } catch (const ConfigError&) {
    refused = true;
  }
  Mlp another;
  if (refused) early->restore(good);
  at::Tensor at_once = at::full({1}, refused ? 1 : 0);
  world.group().all_reduce(at_once).wait();
  if (at_once.item<int>() == 0) {
    EXPECT_THROW(Ddp(another, world.group(), {.hook = early}), ConfigError);
  } else {
    Ddp attached(another, world.group(), {.hook = early});
  }
}

TEST(HookState, ForeignStateIsRefusedByNameAndChangesNothing) {
  spawn(2, [](World& world) {
    for (const auto& [name, make] : makers_of_hooks()) {
      SCOPED_TRACE(name);
      expect_refused(world, make, "'nonsense'", [](auto& s) { s["nonsense"] = at::ones({1}); });
      if (name == "local_sgd") {
        expect_refused(world, make, "'iteration'", [](auto& s) { s["iteration"] = at::ones({1}); });
        expect_refused(world, make, "'iteration'", [](auto& s) { s.clear(); });
        continue;
      }
      const std::string key =
          name.starts_with("power_sgd") ? "error/second.weight" : "second.weight";
      expect_refused(world, make, key, [&](auto& s) { s.at(key) = at::zeros({8, 9}); });
      expect_refused(world, make, key, [&](auto& s) { s.at(key) = s.at(key).to(at::kDouble); });
      expect_refused(world, make, key, [&](auto& s) { s.at(key) = at::Tensor(); });
      expect_refused(world, make, key, [&](auto& s) { s.at(key) = at::full_like(s.at(key), NAN); });
    }
    // A checkpoint of a hook with other options.
    expect_refused(
        world, [] { return std::make_shared<CastHook>(at::kBFloat16); }, "'second.weight'",
        [](auto& s) {
          s["second.weight"] = at::zeros({8, 8});
        });
  });
}

}  // namespace
}  // namespace lockstep::test

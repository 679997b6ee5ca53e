// A model that is divided among the ranks trains to the bits of the same model under Ddp.
#include "lockstep/parallel/fsdp.h"

#include <ATen/record_function.h>

#include <limits>

#include "lockstep/parallel/fused_adam.h"
#include "parallel/fsdp/models.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

class FsdpWorlds : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, FsdpWorlds,
                         ::testing::Values(Ranks{"auto", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                           Ranks{"shm", 4}, Ranks{"gloo", 2}, Ranks{"gloo", 3},
                                           Ranks{"auto", 4, {0, 0, 1, 1}}, Ranks{"tcp", 2}),
                         name_of);

TEST_P(FsdpWorlds, TrainsToTheBitsOfDdp) {
  spawn(GetParam(), [](World& world) {
    const auto compare = [&](const auto& make, parallel::FsdpOptions options) {
      Tower net, usual;
      options.units = units_of<BlockImpl>(*net);
      Fsdp fsdp(net, world.group(), options);
      Ddp ddp(usual, world.group());
      const auto divided = make(fsdp.parameters()), whole = make(usual->parameters());
      for (int step = 0; step < 4; ++step) {
        fsdp.zero_grad();
        tower_loss(net, world.rank(), step).backward();
        divided->step();
        ddp.zero_grad();
        tower_loss(usual, world.rank(), step).backward();
        whole->step();
      }
      expect_same_parameters(fsdp, net, usual);
    };
    const auto adam = [](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                   torch::optim::AdamWOptions(0.01));
    };
    const auto fused = [](std::vector<at::Tensor> parameters) {
      return std::make_unique<FusedAdamW>(std::move(parameters), torch::optim::AdamWOptions(0.01));
    };
    const auto sgd = [](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                                 torch::optim::SGDOptions(0.1).momentum(0.9));
    };
    compare(adam, {});
    compare(fused, {.share_memory = false});
    compare(sgd, {.sharding = parallel::Sharding::Gradients, .share_memory = false});
    compare(fused, {.sharding = parallel::Sharding::None});
    compare(fused, {.backward_prefetch = parallel::BackwardPrefetch::After,
                    .forward_prefetch = true,
                    .share_memory = false});
  });
}

TEST(Fsdp, AReplicatedModelIsDividedWithinItsGroups) {
  for (const bool share : {true, false}) {
    spawn(4, [share](World& world) {
      Tower net, usual;
      Fsdp fsdp(net, world.group(),
                {.units = units_of<BlockImpl>(*net), .shard_ranks = 2, .share_memory = share});
      Ddp ddp(usual, world.group());
      FusedAdamW divided(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
      FusedAdamW whole(usual->parameters(), torch::optim::AdamWOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        fsdp.zero_grad();
        tower_loss(net, world.rank(), step).backward();
        divided.step();
        ddp.zero_grad();
        tower_loss(usual, world.rank(), step).backward();
        whole.step();
      }
      expect_same_parameters(fsdp, net, usual);
    });
  }
}

TEST(Fsdp, EachRankHoldsItsPart) {
  spawn(3, [](World& world) {
    Tower net;
    Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net)});
    const auto units = fsdp.units();
    ASSERT_EQ(units.size(), 4U);
    EXPECT_EQ(units[0].name, "");
    EXPECT_EQ(units[1].name, "blocks.0");
    int64_t own = 0, all = 0;
    for (const auto& unit : units) {
      own += unit.own_numel;
      all += unit.numel;
    }
    int64_t elements = 0;
    for (const auto& leaf : fsdp.parameters()) elements += leaf.numel();
    EXPECT_EQ(own, elements);
    EXPECT_LE(std::abs(own - all / 3), 4 * 1024);
    at::Tensor sum = torch::tensor({own});
    world.group().all_reduce(sum).wait();
    EXPECT_EQ(sum.item<int64_t>(), all);
  });
}

TEST(Fsdp, ADividedParameterThatIsUsedOutsideOfItsUnitIsNamed) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      Tower net;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      const auto text = [&](const auto& use) { return message_of<c10::Error>(use); };
      const auto& weight = net->blocks[1]->up->weight;
      EXPECT_THAT(
          text([&] { weight.sum(); }),
          ::testing::HasSubstr("'blocks.1.up.weight' is sharded over the ranks and has no "
                               "memory outside of its unit: it belongs to unit 'blocks.1'"));
      EXPECT_THAT(text([&] { net->forward(tower_input(0)); }),
                  ::testing::HasSubstr("the root unit (the model itself)"));
      tower_loss(net, world.rank(), 0).backward();
      EXPECT_THAT(text([&] { weight.sum(); }), ::testing::HasSubstr("blocks.1.up.weight"));
      // An optimizer of the module's own parameters would do nothing.
      torch::optim::SGD wrong(net->parameters(), 0.1);
      EXPECT_THAT(text([&] { wrong.step(); }),
                  ::testing::HasSubstr("give an optimizer fsdp.parameters()"));
      fsdp.unshard();
      EXPECT_TRUE(std::isfinite(weight.sum().item<double>()));
      fsdp.reshard();
      EXPECT_THAT(text([&] { weight.sum(); }), ::testing::HasSubstr("blocks.1.up.weight"));
    });
  }
}

TEST(Fsdp, AccumulatesWithAndWithoutCommunication) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      Tower net, usual;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      Ddp ddp(usual, world.group());
      fsdp.zero_grad();
      ddp.zero_grad();
      {
        const auto hold = fsdp.hold();
        const auto other = ddp.hold();
        for (int step = 0; step < 2; ++step) {
          tower_loss(net, world.rank(), step).backward();
          tower_loss(usual, world.rank(), step).backward();
          for (const auto& leaf : fsdp.parameters()) EXPECT_FALSE(leaf.grad().defined());
        }
      }
      tower_loss(net, world.rank(), 2).backward();
      tower_loss(usual, world.rank(), 2).backward();
      expect_same_gradients(fsdp, usual, 0);
      // A second average is added to the first.
      tower_loss(net, world.rank(), 3).backward();
      tower_loss(usual, world.rank(), 3).backward();
      expect_same_gradients(fsdp, usual, 1e-6);
    });
  }
}

TEST(Fsdp, ClipsByTheNormOfAllRanksAlikeOnAnyNumberOfThem) {
  std::vector<double> norms;
  for (const int ranks : {1, 2, 3, 4}) {
    spawn(ranks, [](World& world) {
      Tower net, usual;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net)});
      // The same batch on all, so that the averages do not depend on their number.
      tower_loss(net, 0, 0).backward();
      tower_loss(usual, 0, 0).backward();
      const double norm = fsdp.clip_grad_norm_(0.01).item<double>();
      const double want = parallel::clip_grad_norm_(usual->parameters(), 0.01).item<double>();
      EXPECT_NEAR(norm, want, 1e-5 * want);
      expect_same_gradients(fsdp, usual, 1e-6);
      const Group alone = world.group().split(world.rank());
      Tower single;
      Fsdp whole(single, alone, {.units = units_of<BlockImpl>(*single)});
      tower_loss(single, 0, 0).backward();
      EXPECT_EQ(whole.clip_grad_norm_(0.01).item<double>(), norm);
      // Nor on what its units are.
      Tower other;
      Fsdp one_unit(other, alone);
      tower_loss(other, 0, 0).backward();
      EXPECT_EQ(one_unit.clip_grad_norm_(0.01).item<double>(), norm);
    });
  }
}

TEST(Fsdp, ClipsByNormsOfEveryKindAndDtype) {
  spawn(2, [](World& world) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kComplexFloat}) {
      struct Parameters : torch::nn::Module {
        explicit Parameters(at::ScalarType type) {
          torch::manual_seed(0);
          for (const int64_t size : {5000, 1024, 3}) {
            register_parameter("of" + std::to_string(size), at::randn({size}).to(type));
          }
        }
      };
      for (const double p : {0.5, 1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
        const auto net = std::make_shared<Parameters>(type);
        std::vector<at::Tensor> whole;
        for (const auto& parameter : net->parameters()) {
          const auto wide = parameter.is_complex() ? at::kComplexDouble : at::kDouble;
          whole.push_back(parameter.detach().to(wide, /*non_blocking=*/false, /*copy=*/true));
          whole.back().mutable_grad() = whole.back().clone();
        }
        Fsdp fsdp(net, world.group());
        // Of other strides, too.
        for (auto& shard : fsdp.parameters()) {
          shard.mutable_grad() = at::stack({shard.detach(), shard.detach()}, 1).select(1, 0);
        }
        const double want = parallel::clip_grad_norm_(whole, 1, {.norm_type = p}).item<double>();
        const double norm = fsdp.clip_grad_norm_(1, p).item<double>();
        EXPECT_NEAR(norm, want, 1e-6 * want) << type << " " << p;
      }
    }
  });
}

int64_t operators = 0;

std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction&) {
  ++operators;
  return nullptr;
}

// One for each thousand elements took 25 times as long as the norm of a Ddp's gradients.
TEST(Fsdp, ClipsByAsManyOperatorsInLargeModelsAsInSmallOnes) {
  spawn(1, [](World& world) {
    std::vector<int64_t> counts;
    for (const int64_t width : {64, 512}) {
      torch::nn::Linear net(width, width);
      Fsdp fsdp(net, world.group());
      parallel::call(net, at::ones({1, width})).sum().backward();
      operators = 0;
      const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count_operator));
      EXPECT_GT(fsdp.clip_grad_norm_(1e9).item<double>(), 0);
      at::removeCallback(handle);
      counts.push_back(operators);
    }
    EXPECT_GT(counts[0], 0);
    EXPECT_EQ(counts[0], counts[1]);
  });
}

}  // namespace
}  // namespace lockstep::test

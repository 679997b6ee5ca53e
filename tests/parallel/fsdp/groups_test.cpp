// Fsdp within groups of ranks that replicate each other.
#include <gmock/gmock.h>

#include <string>

#include "lockstep/core/error.h"
#include "parallel/fsdp/models.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using parallel::Lane;
using parallel::StepKey;
using parallel::units_of;
using testing::HasSubstr;

struct ComplexImpl : torch::nn::Module {
  ComplexImpl() {
    torch::manual_seed(2);
    weight = register_parameter("weight", torch::randn({7, 5}, at::kComplexFloat));
  }
  at::Tensor forward(const at::Tensor& x) { return at::abs(x.matmul(weight)).square().mean(); }
  at::Tensor weight;
};
TORCH_MODULE(Complex);

// Three ranks, so that the quotients are rounded.
TEST(FsdpGroups, ComplexGradientsAreAveragedAsUnderDdp) {
  spawn(3, [](World& world) {
    const Complex net, usual;
    expect_as_ddp(world, net, usual, {.sharding = Sharding::None},
                  [&](const Complex& model, int step) {
                    auto generator = at::detail::createCPUGenerator(10 * step + world.rank());
                    return call(model, at::randn({4, 7}, generator, at::kComplexFloat));
                  });
  });
}

// Ranks 0 and 1 go on after the error, and do not end before the others have it.
TEST(FsdpGroups, AnErrorOfOneEndsTheOthers) {
  spawn(4, [](World& world) {
    Tower net;
    Fsdp fsdp(net, world.group().split(0),
              {.units = units_of<BlockImpl>(*net), .shard_ranks = 2, .share_memory = false});
    if (world.rank() == 0) net->blocks.pop_back();
    const std::string error =
        message_of<CommError>([&] { tower_loss(net, world.rank(), 0).backward(); });
    EXPECT_THAT(error, HasSubstr("the ranks disagree"));
    world.group().barrier().wait();
  });
}

// Rank 0 comes to the average of all ranks while rank 1 gathers the last unit.
TEST(FsdpGroups, AUnitThatALaneLeavesOutIsNamed) {
  spawn(4, [](World& world) {
    Tower net;
    Fsdp fsdp(net, world.group().split(0),
              {.units = units_of<BlockImpl>(*net),
               .sharding = Sharding::Gradients,
               .shard_ranks = 2,
               .share_memory = false,
               .lanes = 4});
    if (world.rank() == 0) net->blocks.pop_back();
    const std::string error = message_of<CommError>([&] {
      for (const Lane lane : fsdp.lanes(StepKey{.seed = 1, .step = 0})) {
        tower_loss(net, static_cast<int>(lane.index), 0).backward();
      }
    });
    EXPECT_THAT(error, HasSubstr("the ranks disagree"));
    EXPECT_THAT(error, HasSubstr("unit 'blocks.2'"));
    world.group().barrier().wait();
  });
}

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    for (int i = 0; i < 2; ++i) {
      experts.push_back(register_module("expert" + std::to_string(i), torch::nn::Linear(40, 40)));
    }
  }
  at::Tensor forward(const at::Tensor& x, int64_t lane) {
    const at::Tensor y = x + torch::tanh(experts[lane % 2](x));
    return lane % 3 == 0 ? y : y + torch::tanh(experts[(lane + 1) % 2](x));
  }
  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(Experts);

struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    torch::manual_seed(3);
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Experts()));
    }
  }
  at::Tensor forward(at::Tensor x, int64_t lane) {
    for (auto& layer : layers) x = call(layer, x, lane);
    return x;
  }
  std::vector<Experts> layers;
};
TORCH_MODULE(Mixture);

// Over gloo the average of a layer of which a rank has all gradients waits for the other ranks.
TEST(FsdpGroups, RanksMayUseOtherExpertsInTheirLastLanes) {
  for (const int64_t lanes : {4, 6}) {  // ranks gather units, and all parameters are whole
    spawn({"gloo", 4}, [&](World& world) {
      const Mixture net, usual;
      Fsdp fsdp(net, world.group(),
                {.units = units_of<ExpertsImpl>(*net),
                 .shard_ranks = 2,
                 .share_memory = false,
                 .lanes = lanes});
      Ddp ddp(usual, world.group(), {.lanes = lanes});
      const auto step = [](auto& wrapped, const Mixture& model) {
        for (const Lane lane : wrapped.lanes(StepKey{.seed = 1, .step = 0})) {
          const at::Tensor x = torch::sin(torch::arange(120) + lane.index).view({3, 40});
          call(model, x, lane.index).square().mean().backward();
        }
      };
      step(fsdp, net);
      step(ddp, usual);
      expect_same_gradients(fsdp, usual, 0);
    });
  }
}

}  // namespace
}  // namespace lockstep::test

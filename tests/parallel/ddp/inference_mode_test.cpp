// A host program may hold InferenceMode while it makes a Ddp, an Fsdp or a ZeroOptimizer, and train
// outside of it: they go on as if it had not.
#include <c10/core/InferenceMode.h>

#include <functional>
#include <optional>

#include "lockstep/parallel/call.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using Parameters = std::vector<at::Tensor>;
using MakeParameters = std::function<Parameters(World&, bool held)>;

void expect_alike(const MakeParameters& make) {
  for (const char* backend : {"shm", "tcp"}) {
    spawn(2, [&](World& world) { expect_equal(make(world, true), make(world, false)); },
          {.backend = backend});
  }
}

template <class Optimizer>
void train(Ddp& ddp, Mlp& net, Optimizer& optimizer, int rank, int steps = 3) {
  for (int step = 0; step < steps; ++step) {
    ddp.zero_grad();
    square_loss(net, rank, step).backward();
    optimizer.step();
  }
}

TEST(InferenceModeHeld, DdpAndItsRefresh) {
  expect_alike([](World& world, bool held) {
    Mlp net;
    std::optional<Ddp> ddp;
    {
      const c10::InferenceMode mode(held);
      ddp.emplace(net, world.group());
    }
    torch::optim::Adam adam(net.parameters(), 1e-2);
    train(*ddp, net, adam, world.rank());
    {
      const c10::InferenceMode mode(held);
      ddp->refresh();
    }
    train(*ddp, net, adam, world.rank());
    return net.parameters();
  });
}

TEST(InferenceModeHeld, DdpWithAHookThatKeepsAState) {
  expect_alike([](World& world, bool held) {
    Mlp net;
    std::optional<Ddp> ddp;
    {
      const c10::InferenceMode mode(held);
      ddp.emplace(
          net, world.group(),
          DdpOptions{.hook = std::make_shared<PowerSgd>(PowerSgdOptions{.start_iteration = 1})});
    }
    torch::optim::SGD sgd(net.parameters(), 1e-2);
    train(*ddp, net, sgd, world.rank());
    return net.parameters();
  });
}

TEST(InferenceModeHeld, Fsdp) {
  for (const bool share : {true, false}) {
    expect_alike([share](World& world, bool held) {
      torch::manual_seed(0);
      torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(),
                                torch::nn::Linear(8, 3));
      std::optional<lockstep::Fsdp> fsdp;
      {
        const c10::InferenceMode mode(held);
        fsdp.emplace(net, world.group(), parallel::FsdpOptions{.share_memory = share});
      }
      torch::optim::Adam adam(fsdp->parameters(), 1e-2);
      for (int step = 0; step < 3; ++step) {
        fsdp->zero_grad();
        call(net, input(world.rank(), step)).square().mean().backward();
        adam.step();
      }
      Parameters ends;
      for (const auto& shard : fsdp->parameters()) ends.push_back(shard.detach().clone());
      return ends;
    });
  }
}

TEST(InferenceModeHeld, ZeroOptimizer) {
  expect_alike([](World& world, bool held) {
    Mlp net;
    Ddp ddp(net, world.group());
    std::optional<lockstep::ZeroOptimizer> adam;
    {
      const c10::InferenceMode mode(held);
      adam.emplace(net.parameters(), world.group(),
                   zero<torch::optim::Adam>(torch::optim::AdamOptions(1e-2)));
    }
    train(ddp, net, *adam, world.rank());
    return net.parameters();
  });
}

TEST(InferenceModeHeld, BroadcastOptimizer) {
  expect_alike([](World& world, bool held) {
    Mlp net;
    Ddp ddp(net, world.group());
    torch::optim::Adam adam(net.parameters(), 1e-2);
    train(ddp, net, adam, world.rank());
    {
      const c10::InferenceMode mode(held);
      broadcast_optimizer(adam, world.group());
    }
    train(ddp, net, adam, world.rank());
    return net.parameters();
  });
}

}  // namespace
}  // namespace lockstep::test

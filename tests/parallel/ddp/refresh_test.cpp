// Ddp::refresh() attaches as a constructor would.
#include "lockstep/core/error.h"
#include "lockstep/parallel/deferred_init.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

TEST(DdpRefresh, RefusesALayerOfAnotherDdp) {
  spawn(2, [](World& world) {
    Mlp net, other(1);
    Ddp ddp(net, world.group()), second(other, world.group());
    net.third = net.replace_module("third", other.third.ptr());
    EXPECT_THAT(message_of<ConfigError>([&] { ddp.refresh(); }),
                ::testing::HasSubstr("'third.weight' belongs to another Ddp"));
    square_loss(other, world.rank()).backward();
    const auto make = [] { return std::make_shared<Mlp>(1); };
    expect_equal(gradients(other), average_gradients(2, make, square_loss_of_mlp));
  });
}

TEST(DdpRefresh, TakesALayerThatHasNoMemoryYet) {
  spawn(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(6, 64), torch::nn::Linear(64, 64));
    Ddp ddp(net, world.group());
    {
      const DeferredInit deferred;
      net->replace_module("1", torch::nn::Linear(64, 64));
    }
    ddp.refresh();
    EXPECT_TRUE(net->parameters()[2].isfinite().all().item<bool>());
  });
}

// A ZeroOptimizer has left one copy of them for all ranks, on which each would make its step.
TEST(DdpRefresh, TakesOwnCopiesOfParameters) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    {
      ZeroOptimizer zero(net.parameters(), world.group(),
                         parallel::zero<torch::optim::SGD>(torch::optim::SGDOptions(0.1)),
                         {.share_parameters = true});
      square_loss(net, world.rank()).backward();
      zero.step();
    }
    ddp.refresh();
    ddp.zero_grad();
    square_loss(net, world.rank(), 1).backward();
    const at::Tensor before = net.third->weight.detach().clone();
    world.group().barrier().wait();
    torch::optim::SGD(net.parameters(), 0.1).step();
    world.group().barrier().wait();
    EXPECT_TRUE(at::allclose(net.third->weight, before - 0.1 * net.third->weight.grad()));
  });
}

TEST(DdpRefresh, OfAModuleThatWasDestroyedIsRefused) {
  spawn(2, [](World& world) {
    auto net = std::make_shared<Mlp>();
    Ddp ddp(net, world.group());
    net.reset();
    EXPECT_THAT(message_of<ConfigError>([&] { ddp.refresh(); }),
                ::testing::HasSubstr("a module that was destroyed"));
  });
}

}  // namespace
}  // namespace lockstep::test

// Fsdp after a backward() that threw, after it is gone, and between unshard() and reshard().
#include "support/thrown.h"

#include <fmt/format.h>

#include "lockstep/core/error.h"
#include "parallel/fsdp/models.h"

namespace lockstep::test {
namespace {

using parallel::units_of;
using testing::HasSubstr;

// Each layer is a unit, also the last one.
struct ThrowingChainImpl : torch::nn::Module {
  ThrowingChainImpl() {
    torch::manual_seed(0);
    for (const char* name : {"a", "b", "c", "d"}) {
      layers.push_back(register_module(name, torch::nn::Linear(64, 64)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(call(layer, x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(ThrowingChain);

at::Tensor chain_loss(ThrowingChain& net, int rank, int step) {
  auto generator = at::detail::createCPUGenerator(10 * step + rank);
  return call(net, at::randn({8, 64}, generator)).square().sum();
}

// The average over ranks of the sums of the losses of `steps`.
std::vector<at::Tensor> averages(int ranks, const std::vector<int>& steps) {
  ThrowingChain net;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const int step : steps) (chain_loss(net, rank, step) / ranks).backward();
  }
  std::vector<at::Tensor> all;
  for (const auto& parameter : net->parameters()) all.push_back(parameter.grad());
  return all;
}

void expect_gradients(Fsdp& fsdp, const std::vector<at::Tensor>& want) {
  const auto shards = fsdp.shards();
  ASSERT_EQ(shards.size(), want.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].shard.numel() == 0) continue;
    EXPECT_TRUE(at::allclose(shards[i].shard.grad(), part_of_shard(want[i], shards[i]), 1e-4, 1e-5))
        << i;
  }
}

// Where ranks gather, a backward() needs all of them; otherwise rank 1 comes when rank 0 has
// thrown.
TEST(FsdpThrown, GradientsUnderHoldComeAfterWhatIsInFlight) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      for (const size_t layer : {2, 1}) {
        const std::string key = fmt::format("rank 0 has thrown in {}", layer);
        ThrowingChain net;
        Fsdp fsdp(net, world.group(),
                  {.units = units_of<torch::nn::LinearImpl>(*net), .share_memory = share});
        chain_loss(net, world.rank(), 0).backward();
        fsdp.zero_grad();
        const at::Tensor loss = chain_loss(net, world.rank(), 1);
        if (share && layer == 2 && world.rank() == 1) (void)world.store().get(key);
        const auto bias = net->layers[layer]->bias;
        const auto hook = bias.register_hook(
            [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
        EXPECT_THROW(loss.backward(), std::runtime_error);
        bias.remove_hook(hook);
        if (world.rank() == 0) world.store().set(key, "");
        fsdp.zero_grad();
        {
          const auto hold = fsdp.hold();
          chain_loss(net, world.rank(), 2).backward();
        }
        chain_loss(net, world.rank(), 3).backward();
        expect_gradients(fsdp, averages(2, {2, 3}));
      }
    });
  }
}

// In the middle of a unit, whose gradients so far have neither an average nor a placeholder in the
// module that could be cleared.
TEST(FsdpThrown, GradientsThatHadArrivedAreGone) {
  on_both([](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), options);
    const Ddp ddp(usual, world.group());
    torch::optim::SGD sgd(fsdp.parameters(), 0.1);
    const std::vector<std::function<void()>> ways = {
        [&] { fsdp.zero_grad(); }, [&] { sgd.zero_grad(); }, [&] { net->zero_grad(); }};
    int step = 0;
    for (const auto& clear : ways) {
      for (const bool held : {false, true}) {
        if (held) {
          const auto hold = fsdp.hold();
          tower_loss(net, world.rank(), ++step).backward();
        }
        const auto bias = net->blocks[1]->up->bias;
        const auto hook = bias.register_hook(
            [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
        EXPECT_THROW(tower_loss(net, world.rank(), ++step).backward(), std::runtime_error);
        bias.remove_hook(hook);
        clear();
        usual->zero_grad();
        tower_loss(net, world.rank(), ++step).backward();
        tower_loss(usual, world.rank(), step).backward();
        expect_same_gradients(fsdp, usual, 0);
      }
    }
  });
}

// Of the gradients from before, by an optimizer that writes past autograd. Units that were open are
// gathered again, as those of unshard().
void step_after_it(bool unsharded) {
  on_both([unsharded](World& world, const FsdpOptions& options) {
    Tower net, usual;
    Fsdp fsdp(net, world.group(), with_units(options, units_of<BlockImpl>(*net)));
    Ddp ddp(usual, world.group());
    torch::optim::SGD divided(fsdp.parameters(), 0.1), whole(usual->parameters(), 0.1);
    tower_loss(net, world.rank(), 0).backward();
    tower_loss(usual, world.rank(), 0).backward();
    if (unsharded) fsdp.unshard();
    const auto bias = net->blocks[1]->up->bias;
    const auto hook = bias.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
    EXPECT_THROW(tower_loss(net, world.rank(), 1).backward(), std::runtime_error);
    bias.remove_hook(hook);
    divided.step();
    whole.step();
    fsdp.zero_grad();
    ddp.zero_grad();
    tower_loss(net, world.rank(), 2).backward();
    tower_loss(usual, world.rank(), 2).backward();
    expect_same_gradients(fsdp, usual, 0);
  });
}

TEST(FsdpThrown, AStepAfterItIsSeenByTheNextForward) { step_after_it(false); }
TEST(FsdpThrown, AStepAfterItIsSeenAlsoAfterUnshard) { step_after_it(true); }

// What it leaves in memory that the ranks share needs no more memory than before.
TEST(FsdpGone, ADdpGivesEachRankParametersOfItsOwn) {
  for (const auto dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    spawn(2, [dtype](World& world) {
      Tower net;
      {
        const Fsdp fsdp(net, world.group(),
                        {.units = units_of<BlockImpl>(*net), .param_dtype = dtype});
        EXPECT_TRUE(fsdp.shares_memory());
      }
      const void* before = net->parameters()[0].const_data_ptr();
      const Ddp ddp(net, world.group());
      EXPECT_NE(net->parameters()[0].const_data_ptr(), before);
      const Tower other;
      const at::NoGradGuard no_grad;
      if (world.rank() == 0) {
        for (auto& parameter : net->parameters()) parameter.zero_();
      }
      world.group().barrier().wait();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        const at::Tensor want =
            world.rank() == 0 ? at::zeros_like(other->parameters()[i]) : other->parameters()[i];
        EXPECT_TRUE(at::allclose(net->parameters()[i].to(at::kFloat), want, 1e-2, 1e-2)) << i;
      }
    });
  }
}

TEST(FsdpGone, ADdpTrainsItOn) {
  spawn(2, [](World& world) {
    Tower net, usual;
    {
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net)});
      torch::optim::SGD sgd(fsdp.parameters(), 0.1);
      tower_loss(net, world.rank(), 0).backward();
      sgd.step();
      fsdp.unshard();
    }
    Ddp ddp(usual, world.group());
    torch::optim::SGD all(usual->parameters(), 0.1);
    tower_loss(usual, world.rank(), 0).backward();
    all.step();
    Ddp again(net, world.group());
    torch::optim::SGD sgd(net->parameters(), 0.1);
    for (int step = 1; step < 4; ++step) {
      again.zero_grad();
      ddp.zero_grad();
      tower_loss(net, world.rank(), step).backward();
      tower_loss(usual, world.rank(), step).backward();
      sgd.step();
      all.step();
    }
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(net->parameters()[i], usual->parameters()[i], 1e-5, 1e-6)) << i;
    }
  });
}

// Ranks share the memory that they compute with, and nothing makes them wait before reshard().
TEST(FsdpUnshard, AWriteToShardsAfterAForwardIsRefused) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      Tower net;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      torch::optim::Adam adam(fsdp.parameters());
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        call(net, tower_input(0));
      };
      tower_loss(net, world.rank(), 0).backward();
      fsdp.unshard();
      evaluate();
      fsdp.reshard();
      adam.step();  // allowed: all ranks have met
      tower_loss(net, world.rank(), 1).backward();
      fsdp.unshard();
      evaluate();
      adam.step();
      EXPECT_THAT(
          message_of<ConfigError>([&] { evaluate(); }),
          share ? HasSubstr("call reshard() before an optimizer's step()") : HasSubstr("nothing"));
      evaluate();
    });
  }
}

// Parts that a few ranks keep together from forward to backward are given up, too.
TEST(FsdpWritten, ValuesWrittenPastAutogradAreGathered) {
  spawn(2, [](World& world) {
    Tower net, other;
    Fsdp fsdp(net, world.group(),
              {.units = units_of<BlockImpl>(*net), .reshard_ranks = 1, .share_memory = false});
    call(net, tower_input(0));  // whose graph is dropped
    const at::NoGradGuard no_grad;
    call(net->blocks[0], at::ones({2, TowerImpl::kWidth}));
    for (auto& shard : fsdp.parameters()) shard.data().mul_(0.5);
    for (auto& parameter : other->parameters()) parameter.data().mul_(0.5);
    EXPECT_TRUE(at::equal(call(net, tower_input(0)), other->forward(tower_input(0))));
  });
}

}  // namespace
}  // namespace lockstep::test

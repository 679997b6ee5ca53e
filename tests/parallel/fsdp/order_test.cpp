// Fsdp's collectives come in one order on all ranks, also where their backward passes differ, and
// where a unit's gradients come several times.
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/parallel/activation_checkpointing.h"
#include "parallel/fsdp/models.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using parallel::units_of;

at::Tensor rows(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(1000 * step + rank);
  return at::randn({8, 40}, generator);
}

// One of its layers is used where the rank's batch needs it.
struct ForkImpl : torch::nn::Module {
  ForkImpl() {
    always = register_module("always", torch::nn::Linear(40, 40));
    sometimes = register_module("sometimes", torch::nn::Linear(40, 40));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_both) {
    const at::Tensor y = x + torch::tanh(always(x));
    return uses_both ? y + sometimes(x) : y;
  }
  torch::nn::Linear always{nullptr}, sometimes{nullptr};
};
TORCH_MODULE(Fork);

struct ForksImpl : torch::nn::Module {
  ForksImpl() {
    torch::manual_seed(1);
    for (int i = 0; i < 4; ++i) {
      forks.push_back(register_module("fork" + std::to_string(i), Fork()));
    }
  }
  at::Tensor forward(at::Tensor x, int rank, int step) {
    int number = step;
    for (auto& fork : forks) x = call(fork, x, number++ % 2 == 0 || rank == 0);
    return x;
  }
  std::vector<Fork> forks;
};
TORCH_MODULE(Forks);

TEST(FsdpOrder, AUnitOfWhichSomeRanksUseAPart) {
  for (const auto prefetch :
       {BackwardPrefetch::Before, BackwardPrefetch::After, BackwardPrefetch::None}) {
    on_both([prefetch](World& world, FsdpOptions options) {
      const Forks net, usual;
      options.units = units_of<ForkImpl>(*net);
      options.backward_prefetch = prefetch;
      expect_as_ddp(world, net, usual, options, [&](const Forks& model, int step) {
        return call(model, rows(world.rank(), step), world.rank(), step).square().mean();
      });
    });
  }
}

// The unit within is complete once for each call.
struct RepeatedImpl : torch::nn::Module {
  RepeatedImpl() {
    torch::manual_seed(1);
    repeated = register_module("repeated",
                               torch::nn::Sequential(torch::nn::Linear(40, 40), torch::nn::Tanh()));
    first = register_module("first", torch::nn::Linear(40, 40));
  }
  at::Tensor forward(const at::Tensor& x, int times) {
    at::Tensor y = torch::tanh(call(first, x));
    for (int i = 0; i < times; ++i) y = call(repeated, y);
    return y;
  }
  torch::nn::Sequential repeated{nullptr};
  torch::nn::Linear first{nullptr};
};
TORCH_MODULE(Repeated);

TEST(FsdpOrder, AModuleIsRecomputedForEachOfItsCallsInTheFirstStep) {
  on_both([](World& world, FsdpOptions options) {
    const Repeated net, usual;
    const ActivationCheckpointing recompute({net->repeated.ptr()});
    options.units = units_of<torch::nn::LinearImpl>(*net);
    Fsdp fsdp(net, world.group(), options);
    Ddp ddp(usual, world.group());
    for (int step = 0; step < 3; ++step) {
      fsdp.zero_grad();
      ddp.zero_grad();
      for (const Repeated& model : {net, usual}) {
        call(model, rows(world.rank(), step), step == 0 ? 2 : 1).square().mean().backward();
      }
      expect_same_gradients(fsdp, usual, 1e-6);  // each call's gradients are added by themselves
    }
  });
}

// Each block hands on what all of them look at.
struct HandingImpl : torch::nn::Module {
  HandingImpl() { layer = register_module("layer", torch::nn::Linear(40, 40)); }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& memory) {
    return {torch::tanh(layer(x)) + memory, memory};
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Handing);

struct HandedOnImpl : torch::nn::Module {
  HandedOnImpl() {
    torch::manual_seed(1);
    in = register_module("in", torch::nn::Linear(40, 40));
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Handing()));
    }
    factor = register_parameter("factor", torch::ones({1}));
  }
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x) {
    at::Tensor memory = x = in(x);
    for (auto& block : blocks) std::tie(x, memory) = call(block, x, memory);
    return {x, factor};
  }
  torch::nn::Linear in{nullptr};
  std::vector<Handing> blocks;
  at::Tensor factor;
};
TORCH_MODULE(HandedOn);

// The gradient of that is known when all units are through.
TEST(FsdpOrder, AUnitThatReturnsWhatItWasGivenIsNotGatheredAgain) {
  on_both([](World& world, FsdpOptions options) {
    const HandedOn net;
    options.units = units_of<HandingImpl>(*net);
    Fsdp fsdp(net, world.group(), options);
    const at::Tensor x = rows(world.rank(), 0).requires_grad_();
    int looks = 0;
    x.register_hook([&](const at::Tensor&) {
      for (const auto& block : net->blocks) {
        ++looks;
        EXPECT_THAT(message_of<c10::Error>([&] { block->layer->weight.sum(); }),
                    testing::HasSubstr("has no memory outside of its unit"));
      }
    });
    std::get<0>(call(net, x)).square().mean().backward();
    EXPECT_EQ(looks, 3);
  });
}

TEST(FsdpOrder, AParameterThatIsReturnedKeepsNoHooks) {
  on_both([](World& world, FsdpOptions options) {
    const HandedOn net;
    options.units = units_of<HandingImpl>(*net);
    Fsdp fsdp(net, world.group(), options);
    const auto hooks = [&] {
      return torch::autograd::impl::get_autograd_meta(net->factor)->cpp_hooks_list_->size();
    };
    const size_t before = hooks();
    for (int step = 0; step < 3; ++step) {
      const auto [y, factor] = call(net, rows(world.rank(), step));
      (y * factor).square().mean().backward();
    }
    EXPECT_EQ(hooks(), before);
  });
}

// Nothing is gathered there, so that ranks may call different units.
TEST(FsdpOrder, CallsBetweenUnshardAndReshardAreNotPrefetched) {
  spawn(2, [](World& world) {
    const Forks net, usual;
    Fsdp fsdp(net, world.group(),
              {.units = units_of<ForkImpl>(*net), .forward_prefetch = true, .share_memory = false});
    Ddp ddp(usual, world.group());
    for (int step = 0; step < 2; ++step) {
      fsdp.unshard();
      for (const int fork : world.rank() == 0 ? std::vector{0, 1, 2} : std::vector{0, 3}) {
        const at::NoGradGuard no_grad;
        call(net->forks[fork], rows(world.rank(), step), true);
      }
      fsdp.reshard();
      fsdp.zero_grad();
      ddp.zero_grad();
      for (const Forks& model : {net, usual}) {
        call(model, rows(world.rank(), step), 0, step).square().mean().backward();
      }
      expect_same_gradients(fsdp, usual, 0);
    }
  });
}

}  // namespace
}  // namespace lockstep::test

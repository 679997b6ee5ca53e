// An optimizer divided over the ranks has the bits of the whole one.
#include "lockstep/parallel/zero_optimizer.h"

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <map>
#include <sstream>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/stateful.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using torch::optim::AdamOptions, torch::optim::AdamWOptions, torch::optim::SGDOptions;

// Larger than a cut's grid, so that parameters are divided within.
struct Wide : torch::nn::Module {
  explicit Wide(at::ScalarType dtype = at::kFloat) {
    torch::manual_seed(0);
    first = register_module("first", torch::nn::Linear(6, 900));
    second = register_module("second", torch::nn::Linear(900, 3));
    to(dtype);
    // A parameter whose memory is not in the order of its indices.
    const at::NoGradGuard no_grad;
    second->weight.set_data(second->weight.t().contiguous().t());
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

at::Tensor wide_loss(Wide& net, int rank, int step) {
  return net.forward(input(rank, step).to(net.first->weight.scalar_type())).square().mean();
}

class ZeroWorlds : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, ZeroWorlds,
                         ::testing::Values(Ranks{"auto", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                           Ranks{"shm", 4}, Ranks{"gloo", 2}, Ranks{"gloo", 3}),
                         name_of);

TEST_P(ZeroWorlds, HasTheBitsOfTheWholeOptimizer) {
  spawn(GetParam(), [](World& world) {
    const auto compare = [&](const ZeroOptimizer::Make& make, at::ScalarType dtype,
                             const ZeroOptions& options = {}) {
      Wide net(dtype), usual(dtype);
      Ddp ddp(net, world.group()), other(usual, world.group());
      ZeroOptimizer zero(net.parameters(), world.group(), make, options);
      const auto whole = make({torch::optim::OptimizerParamGroup(usual.parameters())});
      for (int step = 0; step < 5; ++step) {
        ddp.zero_grad();
        wide_loss(net, world.rank(), step).backward();
        zero.step();
        other.zero_grad();
        wide_loss(usual, world.rank(), step).backward();
        whole->step();
      }
      expect_equal(net.parameters(), usual.parameters());
      EXPECT_EQ(zero.shares_parameters(), options.share_parameters && GetParam().backend == "shm");
    };
    compare(zero<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9)), at::kFloat);
    compare(zero<torch::optim::AdamW>(AdamWOptions(0.01)), at::kFloat);
    compare(zero<torch::optim::Adam>(AdamOptions(0.01).weight_decay(0.1)), at::kDouble);
    compare(zero<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01)), at::kFloat);
    compare(zero<FusedAdam>(AdamOptions(0.01)), at::kFloat);
    compare(zero<FusedAdamW>(AdamWOptions(0.01)), at::kBFloat16);
    compare(zero<FusedAdamW>(AdamWOptions(0.01)), at::kFloat, {.share_parameters = true});
  });
}

// Weight clipping and the like: every rank does it, and it is done once.
TEST_P(ZeroWorlds, WhatAllRanksDoToParametersBetweenStepsCountsOnce) {
  spawn(GetParam(), [](World& world) {
    Wide net, usual;
    Ddp ddp(net, world.group()), other(usual, world.group());
    const auto make = zero<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9));
    ZeroOptimizer divided(net.parameters(), world.group(), make);
    const auto whole = make({torch::optim::OptimizerParamGroup(usual.parameters())});
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      wide_loss(net, world.rank(), step).backward();
      divided.step();
      other.zero_grad();
      wide_loss(usual, world.rank(), step).backward();
      whole->step();
      const at::NoGradGuard no_grad;
      for (Wide* each : {&net, &usual}) {
        for (auto& parameter : each->parameters()) parameter.mul_(0.5).sub_(0.01).clamp_(-0.2, 0.2);
      }
      expect_equal(net.parameters(), usual.parameters());
    }
  });
}

// As one process does: two parameters with each other, and one with an average over time, which
// has the parameter's memory from then on.
TEST_P(ZeroWorlds, ParametersThatSwapMemoryKeepTheirValues) {
  spawn(GetParam(), [](World& world) {
    const auto swap = [](at::Tensor one, at::Tensor other) {
      const at::Tensor before = one.detach();
      one.set_data(other.detach());
      other.set_data(before);
    };
    for (const bool share : {false, true}) {
      const auto make = zero<FusedAdam>(AdamOptions(0.01));
      torch::manual_seed(0);
      torch::nn::Sequential net(torch::nn::Linear(6, 40), torch::nn::Linear(40, 40),
                                torch::nn::Linear(40, 40));
      Ddp ddp(net, world);
      const auto usual = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
      Ddp other(*usual, world.group());
      ZeroOptimizer divided(net->parameters(), world.group(), make, {.share_parameters = share});
      const auto whole = make({torch::optim::OptimizerParamGroup(usual->parameters())});
      const at::Tensor average = at::full({40, 40}, 0.01), usual_average = average.clone();
      const auto train = [&](torch::nn::SequentialImpl& of, Ddp& its, torch::optim::Optimizer& by,
                             const at::Tensor& over_time, int step) {
        its.zero_grad();
        of.forward(input(world.rank(), step)).square().mean().backward();
        by.step();
        const at::NoGradGuard no_grad;
        if (step == 1) swap(of.parameters()[2], of.parameters()[4]);
        if (step == 2) swap(of.parameters()[4], over_time);
      };
      for (int step = 0; step < 5; ++step) {
        train(*net, ddp, divided, average, step);
        train(*usual, other, *whole, usual_average, step);
        expect_equal(net->parameters(), usual->parameters());
        EXPECT_TRUE(at::equal(average, usual_average));
      }
    }
  });
}

TEST(Zero, ComplexParametersToo) {
  for (const std::string backend : {"shm", "gloo"}) {
    spawn(2,
          [](World& world) {
            const auto make = [] {
              torch::manual_seed(0);
              auto module = std::make_shared<torch::nn::Module>();
              module->register_parameter("p", torch::randn({40, 50}, at::kComplexFloat));
              return module;
            };
            const auto net = make(), usual = make();
            Ddp ddp(*net, world.group());
            const auto sgd = zero<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9));
            ZeroOptimizer divided(net->parameters(), world.group(), sgd);
            const auto whole = sgd({torch::optim::OptimizerParamGroup(usual->parameters())});
            for (int step = 0; step < 3; ++step) {
              ddp.zero_grad();
              at::view_as_real(net->parameters()[0]).square().sum().backward();
              divided.step();
              usual->zero_grad();
              at::view_as_real(usual->parameters()[0]).square().sum().backward();
              whole->step();
            }
            expect_equal(net->parameters(), usual->parameters());
          },
          {.backend = backend});
  }
}

TEST(Zero, EachRankHoldsItsPartOfTheState) {
  spawn(3, [](World& world) {
    Wide net;
    ZeroOptimizer zero_adam(net.parameters(), world.group(), zero<FusedAdam>(AdamOptions(0.01)));
    wide_loss(net, world.rank(), 0).backward();
    zero_adam.step();
    int64_t whole = 0;
    for (const auto& parameter : net.parameters()) whole += parameter.numel();
    checkpoint::Names names;
    for (const auto& item : net.named_parameters()) names.add(item.value(), item.key());
    // The memory behind what this rank would save, each allocation once.
    std::map<std::string, std::map<const void*, int64_t>> memory;
    for (const auto& piece : stateful(zero_adam)->state(names).pieces) {
      for (const auto& part : piece.parts) {
        const auto& storage = part.tensor.storage();
        const std::string kind = piece.name.substr(0, piece.name.find('/'));
        memory[kind][storage.data()] = static_cast<int64_t>(storage.nbytes()) / 4;
      }
    }
    for (const std::string kind : {"exp_avg", "exp_avg_sq"}) {
      int64_t own = 0;
      for (const auto& [address, elements] : memory[kind]) own += elements;
      EXPECT_LE(std::abs(own - whole / 3), 1100) << kind;
      at::Tensor all = torch::tensor({own});
      world.group().all_reduce(all).wait();
      EXPECT_EQ(all.item<int64_t>(), whole) << kind;
      EXPECT_EQ(own, zero_adam.own_elements()) << kind;
    }
  });
}

TEST(Zero, GroupsKeepTheirOptions) {
  spawn(2, [](World& world) {
    const auto groups_of = [](Wide& net) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<at::Tensor>{net.first->weight, net.first->bias},
                          std::make_unique<SGDOptions>(0.5));
      groups.emplace_back(std::vector<at::Tensor>{net.second->weight, net.second->bias},
                          std::make_unique<SGDOptions>(0.01));
      return groups;
    };
    Wide net, usual;
    Ddp ddp(net, world.group()), other(usual, world.group());
    ZeroOptimizer divided(groups_of(net), world.group(), zero<torch::optim::SGD>(SGDOptions(0.1)));
    torch::optim::SGD whole(groups_of(usual), SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      // As a scheduler does.
      for (auto* optimizer : std::initializer_list<torch::optim::Optimizer*>{&divided, &whole}) {
        optimizer->param_groups()[1].options().set_lr(0.02 * step);
      }
      ddp.zero_grad();
      wide_loss(net, world.rank(), step).backward();
      divided.step();
      other.zero_grad();
      wide_loss(usual, world.rank(), step).backward();
      whole.step();
    }
    expect_equal(net.parameters(), usual.parameters());
  });
}

TEST(Zero, AParameterWithoutAGradientIsLeftAlone) {
  spawn(2, [](World& world) {
    Wide net;
    ZeroOptimizer sgd(net.parameters(), world.group(), zero<torch::optim::SGD>(SGDOptions(0.1)));
    const at::Tensor before = net.second->weight.detach().clone();
    net.first->weight.sum().backward();
    sgd.step();
    EXPECT_TRUE(at::equal(net.second->weight, before));
    sgd.zero_grad();
    EXPECT_FALSE(net.first->weight.grad().defined());
  });
}

TEST(Zero, ResumesToTheSameBits) {
  spawn(2, [](World& world) {
    const auto train = [&](Wide& net, ZeroOptimizer& optimizer, int from, int to) {
      Ddp ddp(net, world.group());
      for (int step = from; step < to; ++step) {
        optimizer.zero_grad();
        wide_loss(net, world.rank(), step).backward();
        optimizer.step();
      }
    };
    Wide net, resumed;
    const auto make = zero<FusedAdamW>(AdamWOptions(0.01));
    ZeroOptimizer adam(net.parameters(), world.group(), make);
    train(net, adam, 0, 3);
    std::stringstream model, state;
    torch::serialize::OutputArchive model_out, state_out;
    net.save(model_out);
    model_out.save_to(model);
    adam.save(state_out);
    state_out.save_to(state);
    train(net, adam, 3, 5);

    ZeroOptimizer again(resumed.parameters(), world.group(), make);
    torch::serialize::InputArchive model_in, state_in;
    model_in.load_from(model);
    resumed.load(model_in);
    state_in.load_from(state);
    again.load(state_in);
    train(resumed, again, 3, 5);
    expect_equal(resumed.parameters(), net.parameters());

    const Group alone = world.group().split(world.rank());
    Wide other;
    ZeroOptimizer whole(other.parameters(), alone, make);
    torch::serialize::InputArchive once_more;
    state.seekg(0);
    once_more.load_from(state);
    EXPECT_THROW(whole.load(once_more), ConfigError);
  });
}

// Its memory has the old dtype, into which the next step would have brought all parameters back.
TEST(Zero, AModelThatWasConvertedWantsAnother) {
  for (const bool share : {false, true}) {
    spawn(2, [&](World& world) {
      torch::manual_seed(0);
      torch::nn::Linear net(6, 3);
      Ddp ddp(net, world);
      const auto optimizer = [&] {
        return ZeroOptimizer(net->parameters(), world.group(), zero<FusedAdam>(AdamOptions(0.1)),
                             {.share_parameters = share});
      };
      const auto backward = [&](at::ScalarType dtype) {
        ddp.zero_grad();
        net->forward(at::ones({2, 6}, dtype)).sum().backward();
      };
      auto first = optimizer();
      backward(at::kFloat);
      first.step();
      net->to(at::kDouble);
      ddp.refresh();
      backward(at::kDouble);
      const at::Tensor before = net->weight.detach().clone();
      EXPECT_THAT(message_of<ConfigError>([&] { first.step(); }),
                  testing::HasSubstr("is of Double and shape [3, 6] now, and was of Float"));
      EXPECT_TRUE(at::equal(net->weight, before));
      optimizer().step();
      EXPECT_EQ(net->weight.scalar_type(), at::kDouble);
      EXPECT_FALSE(at::equal(net->weight, before));
    });
  }
}

// As torch::optim does, which steps what has a gradient.
TEST(Zero, ParametersThatAreNoRealNumbersStayAsTheyAre) {
  spawn(2, [](World& world) {
    struct Quantized : Wide {
      at::Tensor codes =
          register_parameter("codes", at::arange(5000, at::kLong), /*requires_grad=*/false);
    } net;
    Ddp ddp(net, world.group());
    ZeroOptimizer sgd(net.parameters(), world.group(), zero<torch::optim::SGD>(SGDOptions(0.1)));
    const at::Tensor before = net.first->weight.detach().clone();
    wide_loss(net, world.rank(), 0).backward();
    sgd.step();
    EXPECT_TRUE(at::equal(net.codes, at::arange(5000, at::kLong)));
    EXPECT_FALSE(at::equal(net.first->weight, before));
  });
}

TEST(Zero, RefusesWhatItCannotDivide) {
  spawn(2, [](World& world) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(8, 2).sparse(true));
    ZeroOptimizer sgd(table->parameters(), world.group(), zero<torch::optim::SGD>(SGDOptions(0.1)));
    table->forward(torch::tensor({1})).sum().backward();
    const at::Tensor before = table->weight.detach().clone();
    EXPECT_THROW(sgd.step(), ConfigError);
    EXPECT_TRUE(at::equal(table->weight, before));
    EXPECT_THROW(ZeroOptimizer(std::vector<at::Tensor>{}, world.group(),
                               zero<torch::optim::SGD>(SGDOptions(0.1))),
                 ConfigError);
    torch::nn::Linear net(2, 2);
    EXPECT_THROW(ZeroOptimizer(net->parameters(), world.group(),
                               zero<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1))),
                 ConfigError);
  });
}

TEST(Zero, SharedParametersAreEachRanksOwnUnderTheNextDdp) {
  spawn(2, [](World& world) {
    Wide net;
    const Wide other;
    {
      const ZeroOptimizer sgd(net.parameters(), world.group(),
                              zero<torch::optim::SGD>(SGDOptions(0.1)), {.share_parameters = true});
      EXPECT_TRUE(sgd.shares_parameters());
    }
    const Ddp ddp(net, world.group());
    const at::NoGradGuard no_grad;
    if (world.rank() == 0) {
      for (auto& parameter : net.parameters()) parameter.zero_();
    }
    world.group().barrier().wait();
    const auto after = net.parameters(), before = other.parameters();
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_TRUE(at::equal(after[i], world.rank() == 0 ? at::zeros_like(before[i]) : before[i]));
    }
  });
}

// A small parameter of a dtype of its own is one rank's alone.
// Counts the ranks that have begun a step, where all of them see it.
struct Counted : torch::optim::SGD {
  Counted(std::vector<torch::optim::OptimizerParamGroup> groups, int* count)
      : SGD(std::move(groups), SGDOptions(0.1)), begun(count) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    ++std::atomic_ref(*begun);
    return SGD::step(std::move(closure));
  }
  int* begun;
};

TEST(Zero, NoRankWritesToSharedParametersThatAnotherStillReads) {
  spawn({"shm", 2}, [](World& world) {
    at::Tensor count = world.group().shared({1}, at::kInt);
    int* const begun = count.mutable_data_ptr<int>();
    if (world.is_main()) *begun = 0;
    Wide net;
    Ddp ddp(net, world.group());
    ZeroOptimizer zero(
        net.parameters(), world.group(),
        [&](auto groups) { return std::make_unique<Counted>(std::move(groups), begun); },
        {.share_parameters = true});
    ASSERT_TRUE(zero.shares_parameters());
    wide_loss(net, world.rank(), 0).backward();
    // This rank reads them for a while, and the other one does not.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    while (world.is_main() && std::chrono::steady_clock::now() < until) {
      ASSERT_EQ(std::atomic_ref(*begun).load(), 0);
    }
    zero.step();
    EXPECT_EQ(std::atomic_ref(*begun).load(), 2);
  });
}

TEST(Zero, WhatTheInnerOptimizerRefusesOnOneRankEndsAll) {
  spawn(2, [](World& world) {
    const at::Tensor real = torch::ones({3000}).requires_grad_();
    const at::Tensor complex = torch::ones({10}, at::kComplexFloat).requires_grad_();
    ZeroOptimizer adam(std::vector<at::Tensor>{real, complex}, world.group(),
                       zero<parallel::FusedAdam>(AdamOptions(0.1)));
    for (const at::Tensor& tensor : {real, complex})
      tensor.mutable_grad() = tensor.detach().clone();
    const std::string text = message_of([&] { adam.step(); });
    EXPECT_THAT(text, testing::HasSubstr("is of no floating-point dtype"));
  });
}

// Also of a parameter that another rank updates.
TEST_P(ZeroWorlds, AGraphFromBeforeAStepCannotRunBackward) {
  spawn(GetParam(), [](World& world) {
    for (const bool share : {false, true}) {
      Wide net;
      Ddp ddp(net, world.group());
      ZeroOptimizer adam(net.parameters(), world.group(),
                         parallel::zero<parallel::FusedAdam>(AdamOptions(0.1)),
                         {.share_parameters = share});
      const at::Tensor before = wide_loss(net, world.rank(), 0);
      wide_loss(net, world.rank(), 1).backward();
      adam.step();
      EXPECT_THAT(message_of([&] { before.backward(); }),
                  testing::HasSubstr("modified by an inplace operation"));
    }
  });
}

}  // namespace
}  // namespace lockstep::test

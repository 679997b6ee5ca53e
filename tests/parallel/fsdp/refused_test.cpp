// What Fsdp and ZeroOptimizer refuse to divide, on all ranks, when one has reason for it.
#include <fmt/format.h>

#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/fsdp/models.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::SGDOptions;

struct ThreeImpl : torch::nn::Module {
  ThreeImpl() {
    torch::manual_seed(3);
    a = register_module("a", torch::nn::Linear(30, 30));
    b = register_module("b", torch::nn::Linear(30, 30));
    c = register_module("c", torch::nn::Linear(30, 30));
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
  torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
};
TORCH_MODULE(Three);

at::Tensor three_rows(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(1000 * step + rank);
  return at::randn({4, 30}, generator);
}

ZeroOptimizer::Make make_sgd() { return zero<torch::optim::SGD>(SGDOptions(0.1)); }

TEST(FsdpRefused, ParametersThatAreTiedByTheirMemory) {
  on_both([](World& world, const FsdpOptions& options) {
    // On one rank only: all throw.
    Three net;
    if (world.rank() == 1) net->c->weight.set_data(net->b->weight.detach());
    EXPECT_THAT(message_of<ConfigError>([&] { Fsdp(net, world.group(), options); }),
                AllOf(HasSubstr("[fsdp] rank 1: parameter 'b.weight' and parameter 'c.weight' are "
                                "different tensors in the same memory"),
                      HasSubstr("register one tensor under both names")));
    // It is as it was.
    EXPECT_EQ(net->c->weight.is_alias_of(net->b->weight), world.rank() == 1);
    EXPECT_TRUE(std::isfinite(net->forward(three_rows(0, 0)).sum().item<double>()));
  });
}

TEST(FsdpRefused, MemoryThatADividedParameterSharesWithWhatStaysWhole) {
  spawn(2, [](World& world) {
    Three net;
    net->c->weight.set_data(net->b->weight.detach());
    EXPECT_THAT(
        message_of<ConfigError>([&] { Fsdp(net, world.group(), {.ignore = {"c.weight"}}); }),
        HasSubstr("parameter 'b.weight' and parameter 'c.weight' are different"));
    Three other;
    other->register_buffer("row", other->a->weight.detach()[3]);
    EXPECT_THAT(message_of<ConfigError>([&] { Fsdp(other, world.group()); }),
                HasSubstr("parameter 'a.weight' and buffer 'row' are different"));
  });
}

// As Glow's ActNorm does with its first batch.
struct FirstBatchImpl : torch::nn::Module {
  FirstBatchImpl() { scale = register_parameter("scale", at::ones({30})); }
  at::Tensor forward(const at::Tensor& x) {
    if (sets) {
      const at::NoGradGuard no_grad;
      scale.copy_(1 + x.mean(0));
    }
    return x * scale;
  }
  bool sets = false;
  at::Tensor scale;
};
TORCH_MODULE(FirstBatch);

TEST(FsdpRefused, AForwardThatWritesToAParameter) {
  on_both([](World& world, const FsdpOptions& options) {
    FirstBatch net;
    Fsdp fsdp(net, world.group(), options);
    const at::Tensor x = three_rows(world.rank(), 0);
    call(net, x).sum().backward();
    net->sets = world.rank() == 1;
    fsdp.zero_grad();
    EXPECT_THAT(message_of<ConfigError>([&] { call(net, x).sum().backward(); }),
                AllOf(HasSubstr("[fsdp] rank 1: parameter 'scale' was written to by forward()"),
                      HasSubstr("before the Fsdp")));
    net->sets = true;
    const at::NoGradGuard no_grad;
    EXPECT_THAT(message_of<ConfigError>([&] { call(net, x); }),
                HasSubstr(fmt::format("rank {}: parameter 'scale' was written", world.rank())));
  });
}

TEST(FsdpRefused, AWriteBetweenUnshardAndReshard) {
  on_both([](World& world, const FsdpOptions& options) {
    Three net;
    Fsdp fsdp(net, world.group(), options);
    const auto clamp = [&] {
      const at::NoGradGuard no_grad;
      net->b->weight[3].clamp_(-0.01, 0.01);
    };
    fsdp.unshard();
    clamp();
    EXPECT_THAT(message_of<ConfigError>([&] { fsdp.reshard(); }),
                HasSubstr("parameter 'b.weight' was written to"));
    fsdp.unshard();
    clamp();
    const at::Tensor x = three_rows(world.rank(), 0);
    EXPECT_THAT(message_of<ConfigError>([&] { call(net, x).sum().backward(); }),
                HasSubstr("parameter 'b.weight' was written to"));
  });
}

// What an optimizer writes to the shards moves the parameters' versions, too.
TEST(FsdpRefused, NoWriteToShards) {
  on_both([](World& world, const FsdpOptions& options) {
    Three net;
    Fsdp fsdp(net, world.group(), options);
    for (int step = 0; step < 3; ++step) {
      fsdp.zero_grad();
      call(net, three_rows(world.rank(), step)).sum().backward();
      const at::NoGradGuard no_grad;
      for (auto& shard : fsdp.parameters()) shard.sub_(shard.grad(), 0.1);
      fsdp.unshard();
      fsdp.reshard();
      call(net, three_rows(world.rank(), step));
    }
  });
}

TEST(FsdpRefused, AModelOfOneRankThatIsTiedByMemory) {
  spawn(1, [](World& world) {
    Three net;
    net->c->weight.set_data(net->b->weight.detach());
    EXPECT_THAT(message_of<ConfigError>([&] { Fsdp(net, world.group()); }),
                HasSubstr("'b.weight' and parameter 'c.weight'"));
  });
}

TEST(ZeroRefused, ParametersThatAreTiedByTheirMemory) {
  for (const int ranks : {1, 2}) {
    spawn(ranks, [](World& world) {
      const int last = world.size() - 1;
      for (const bool share : {false, true}) {
        Three net;
        if (world.rank() == last) net->c->weight.set_data(net->b->weight.detach());
        EXPECT_THAT(
            message_of<ConfigError>([&] {
              ZeroOptimizer(net->parameters(), world.group(), make_sgd(),
                            {.share_parameters = share});
            }),
            HasSubstr(fmt::format("[zero] rank {}: parameter 2 of shape [30, 30] and parameter 4 "
                                  "of shape [30, 30] are different tensors in the same memory",
                                  last)));
      }
    });
  }
}

TEST(ZeroRefused, ParametersThatAreTiedByTheirMemoryLater) {
  spawn(2, [](World& world) {
    Three net;
    const Ddp ddp(net, world.group());
    ZeroOptimizer zero(net->parameters(), world.group(), make_sgd());
    net->forward(three_rows(world.rank(), 0)).square().mean().backward();
    net->c->weight.set_data(net->b->weight.detach());
    EXPECT_THAT(message_of<ConfigError>([&] { zero.step(); }),
                HasSubstr("are different tensors in the same memory"));
  });
}

TEST(ZeroRefused, WhatOneRankCannotDivideOnAllRanks) {
  spawn(2, [](World& world) {
    at::Tensor parameter = at::zeros({4, 4});
    if (world.rank() == 0) parameter = at::zeros({4, 8}).narrow(1, 0, 4);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  ZeroOptimizer(std::vector<at::Tensor>{parameter}, world.group(), make_sgd());
                }),
                HasSubstr("[zero] rank 0: parameter 0 of shape [4, 4] has overlapping or gapped"));
  });
}

// Parameters that lie side by side in one buffer, as a flattened RNN's do on CUDA.
TEST(FsdpRefused, ViewsOfOneBufferAreNot) {
  on_both([](World& world, const FsdpOptions& options) {
    const auto make = [] {
      Three net;
      const at::Tensor buffer = at::empty({3 * 930});
      int64_t begin = 0;
      for (auto& parameter : net->parameters()) {
        const at::Tensor view = buffer.narrow(0, begin, parameter.numel()).view(parameter.sizes());
        view.copy_(parameter.detach());
        parameter.set_data(view);
        begin += parameter.numel();
      }
      return net;
    };
    const auto loss = [&](const Three& model, int step) {
      return call(model, three_rows(world.rank(), step)).square().mean();
    };
    const Three net = make(), usual;
    expect_as_ddp(world, net, usual, options, loss);
    const Three first = make(), second;
    const Ddp one(first, world.group()), two(second, world.group());
    ZeroOptimizer divided(first->parameters(), world.group(), make_sgd());
    torch::optim::SGD whole(second->parameters(), SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      divided.zero_grad();
      whole.zero_grad();
      loss(first, step).backward();
      loss(second, step).backward();
      divided.step();
      whole.step();
    }
    for (size_t i = 0; i < first->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(first->parameters()[i], second->parameters()[i])) << i;
    }
  });
}

struct LstmNetImpl : torch::nn::Module {
  LstmNetImpl() {
    torch::manual_seed(3);
    layers = register_module(
        "layers",
        torch::nn::LSTM(torch::nn::LSTMOptions(30, 20).num_layers(2).bidirectional(true)));
    layers->flatten_parameters();
  }
  at::Tensor forward(const at::Tensor& x) { return std::get<0>(call(layers, x)); }
  torch::nn::LSTM layers{nullptr};
};
TORCH_MODULE(LstmNet);

TEST(FsdpRefused, RecurrentLayersAreNot) {
  on_both([](World& world, const FsdpOptions& options) {
    const LstmNet net, usual;
    expect_as_ddp(
        world, net, usual, with_units(options, {net->layers.ptr()}),
        [&](const LstmNet& model, int step) {
          return call(model, three_rows(world.rank(), step).view({2, 2, 30})).square().mean();
        });
  });
}

// lockstep::call() runs forward() only.
TEST(FsdpRefused, ARecurrentLayerOfPackedInputIsToldWhatToDo) {
  on_both([](World& world, FsdpOptions options) {
    LstmNet net;
    const Fsdp fsdp(net, world.group(), with_units(options, {net->layers.ptr()}));
    const auto rows = torch::nn::utils::rnn::pack_padded_sequence(
        three_rows(world.rank(), 0).view({2, 2, 30}), torch::full({2}, 2, at::kLong));
    EXPECT_THAT(message_of([&] { net->layers->forward_with_packed_input(rows); }),
                AllOf(HasSubstr("it belongs to unit 'layers', so call that by lockstep::call()"),
                      HasSubstr("forward_with_packed_input()): make the module around it the "
                                "unit, by FsdpOptions::units")));
  });
}

TEST(FsdpRefused, OptionsThatAreWrongOnOneRankOnly) {
  spawn(2, [](World& world) {
    const auto refused = [&](FsdpOptions wrong) {
      const FsdpOptions& given = world.rank() == 1 ? wrong : FsdpOptions();
      return message_of<ConfigError>([&] { Fsdp(Three(), world.group(), given); });
    };
    Three other;
    EXPECT_THAT(refused({.units = {other->b.ptr()}}),
                HasSubstr("[fsdp] rank 1: FsdpOptions::units has a module "
                          "(torch::nn::LinearImpl) that is not part of the model"));
    EXPECT_THAT(refused({.ignore = {"d.weight"}}),
                HasSubstr("[fsdp] rank 1: FsdpOptions::ignore names 'd.weight'"));
    EXPECT_THAT(refused({.shard_ranks = 3}), HasSubstr("[fsdp] rank 1: shard_ranks = 3"));
    EXPECT_THAT(refused({.lanes = -1}), HasSubstr("[fsdp] rank 1: "));
  });
}

// It would compute with what some ranks have written already.
TEST(FsdpRefused, ABackwardOfAForwardFromBeforeTheStepIsRefused) {
  for (const bool recomputes : {false, true})
    on_both([=](World& world, const FsdpOptions& options) {
      Three net;
      Fsdp fsdp(net, world.group(), options);
      std::optional<ActivationCheckpointing> recompute;
      if (recomputes) recompute.emplace(std::vector<std::shared_ptr<torch::nn::Module>>{net.ptr()});
      FusedAdamW adam(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
      const at::Tensor loss = call(net, three_rows(world.rank(), 0)).square().mean();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward({}, /*retain_graph=*/true);  // nothing was written
      adam.step();
      EXPECT_THAT(message_of([&] { loss.backward(); }),
                  HasSubstr("modified by an inplace operation"));
      call(net, three_rows(world.rank(), 0)).square().mean().backward();
    });
}

// As of two networks in one module, each with an optimizer.
TEST(FsdpRefused, ABackwardOfOtherUnitsThanTheStepHasWrittenIsNot) {
  on_both([](World& world, const FsdpOptions& options) {
    const auto gradient = [&](bool steps) {
      Three net;
      Fsdp fsdp(net, world.group(), with_units(options, units_of<torch::nn::LinearImpl>(*net)));
      const auto shards = fsdp.parameters();  // weights and biases of a, b and c
      FusedAdamW adam({shards[0], shards[1]}, torch::optim::AdamWOptions(0.01));
      const at::Tensor first = call(net->a, three_rows(world.rank(), 0)).square().mean();
      const at::Tensor second = call(net->b, three_rows(world.rank(), 1)).square().mean();
      first.backward();
      if (steps) adam.step();
      second.backward();
      return shards[2].grad().clone();
    };
    EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
  });
}

// Ranks share the memory that they compute with, and only a backward() makes them wait.
TEST(FsdpRefused, AWriteToShardsAfterAForwardThatHasHadNoBackward) {
  on_both([](World& world, const FsdpOptions& options) {
    Three net;
    Fsdp fsdp(net, world.group(), options);
    const auto write = [&] {
      const at::NoGradGuard no_grad;
      for (auto& shard : fsdp.parameters()) shard.mul_(0.5);
    };
    const at::Tensor x = three_rows(world.rank(), 0);
    {
      const at::NoGradGuard no_grad;
      call(net, x);
    }
    write();
    call(net, x).sum().backward();
    write();
    call(net, x);  // allowed: nothing is written
    call(net, x);
    write();
    EXPECT_THAT(message_of<ConfigError>([&] { call(net, x); }),
                options.share_memory ? HasSubstr("run such a forward under torch::NoGradGuard")
                                     : HasSubstr("nothing"));
    call(net, x).sum().backward();
  });
}

TEST(FsdpRefused, ALayerOfAnotherDtypeThatCameLater) {
  spawn(2, [](World& world) {
    Three net;
    net->to(at::kDouble);
    Fsdp fsdp(net, world.group(), {.param_dtype = at::kFloat});
    const at::Tensor x = three_rows(world.rank(), 0).to(at::kDouble);
    call(net, x).sum().backward();
    net->b = net->replace_module("b", torch::nn::Linear(30, 30));
    net->b->to(at::kDouble);
    EXPECT_THAT(message_of<ConfigError>([&] { call(net, x); }),
                AllOf(HasSubstr("[fsdp] parameter 'b.weight'"),
                      HasSubstr("after Fsdp was attached: construct it again, after unshard()"),
                      HasSubstr("must have the same dtype")));
  });
}

TEST(FsdpRefused, ParametersOfOneThatIsGone) {
  spawn(2, [](World& world) {
    Three net;
    net->a->weight.set_requires_grad(false);
    { const Fsdp fsdp(net, world.group(), {.share_memory = false}); }
    EXPECT_THAT(message_of([&] { net->forward(three_rows(0, 0)); }),
                HasSubstr("sharded over the ranks by an Fsdp that is gone"));

    Three thawed;
    thawed->a->weight.set_requires_grad(false);
    {
      Fsdp fsdp(thawed, world.group(), {.share_memory = false});
      thawed->a->weight.set_requires_grad(true);
      EXPECT_THAT(message_of<ConfigError>(
                      [&] { call(thawed, three_rows(world.rank(), 0)).sum().backward(); }),
                  HasSubstr("construct it again, after unshard()"));
      fsdp.unshard();
    }
    const Fsdp again(thawed, world.group(), {.share_memory = false});
    call(thawed, three_rows(world.rank(), 0)).sum().backward();
    EXPECT_TRUE(again.parameters()[0].grad().defined());
  });
}

}  // namespace
}  // namespace lockstep::test

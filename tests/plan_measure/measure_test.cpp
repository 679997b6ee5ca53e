// What is counted of the built-in models, against what libtorch allocates.
#include "lockstep/plan/measure.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "comm/shm/segment.h"
#include "lockstep/core/error.h"
#include "lockstep/models/models.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/plan/placement.h"
#include "lockstep/plan/strategy.h"
#include "plan/measure/allocations.h"
#include "plan/sharding.h"
#include "support/spawn.h"

namespace lockstep::plan {
namespace {

constexpr double kKeptWithin = 0.01, kPeakWithin = 0.05;
// What a convolution works with beside its tensors depends on the instruction set.
constexpr double kConvolutions = 0.25;

void expect_as_counted(torch::nn::Module& net, const std::function<at::Tensor()>& loss,
                       const ModelProfile& profile, int64_t batch,
                       Recomputed recomputed = Recomputed::Nothing,
                       double peak_within = kPeakWithin) {
  int64_t elements = 0, buffers = 0;
  for (const auto& parameter : net.parameters()) elements += parameter.numel();
  for (const auto& buffer : net.buffers()) buffers += buffer.numel();
  EXPECT_EQ(profile.elements(), elements);
  EXPECT_EQ(profile.buffer_elements, buffers);

  measure_pass(net, loss, 0);  // libraries take memory at first
  const auto measured = measure_pass(net, loss, 0);
  const Training training = {.batch = batch, .recomputed = recomputed, .state_bytes = 0};
  const auto memory = memory_of(profile, training, Strategy::Ddp, this_host(), 1);
  // A block that is recomputed keeps the state of a random generator, too.
  const double within = recomputed == Recomputed::Blocks ? 2 * kKeptWithin : kKeptWithin;
  EXPECT_NEAR(memory.activations / measured.kept, 1, within)
      << profile.name << ": counted " << memory.activations << ", measured " << measured.kept;
  // The transformer's loss computes its gradients in forward.
  double flops = profile.forward_flops();
  if (profile.units.back().chunked > 0) flops += 2 * profile.units.back().flops;
  EXPECT_NEAR(measured.flops / (flops * static_cast<double>(batch)), 1, 0.02) << profile.name;
  // With Adam, which holds two more numbers for each parameter.
  const double states = 16 * static_cast<double>(elements);
  EXPECT_NEAR((states + memory.activations + memory.working) / (states + measured.peak), 1,
              peak_within)
      << profile.name << ": counted " << memory.activations + memory.working << ", measured "
      << measured.peak << " beside " << states;
}

TEST(Measure, SharedMemoryIsRoundedAsGroupsRoundIt) {
  for (const int64_t bytes : {1, 4096, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, 37 << 20}) {
    EXPECT_DOUBLE_EQ(shared_memory_bytes(static_cast<double>(bytes)),
                     static_cast<double>(comm::page_rounded(bytes)));
  }
}

// With its parameters and optimizer, from one step to the next.
TEST(Measure, OneRankNeedsWhatIsCounted) {
  test::spawn(1, [](World& world) {
    models::Mlp net(models::MlpOptions{.sizes = {784, 1024, 1024, 10}});
    const auto x = torch::randn({64, 784}), y = torch::randint(10, {64});
    Ddp ddp(*net, world);
    FusedAdamW adam(net->parameters(), torch::optim::AdamWOptions(1e-4));
    const auto step = [&] {
      ddp.zero_grad();
      torch::nn::functional::cross_entropy(net->forward(x), y).backward();
      adam.step();
    };
    for (int i = 0; i < 2; ++i) step();
    ddp.zero_grad();
    const auto memory = std::make_shared<Allocations>();
    {
      const Allocations::Watch watch(memory);
      step();
    }
    const auto profile =
        profile_of({.model = {.kind = "mlp", .mlp = {.hidden = {1024, 1024}}}}, {{784}, 10});
    const auto planned = memory_of(profile, {.batch = 64}, Strategy::Ddp, this_host(), 1);
    const double states = 12 * static_cast<double>(profile.elements());
    EXPECT_NEAR((planned.tensors - planned.data) / (states + memory->peak()), 1, kPeakWithin);
  });
}

at::Tensor classes(int64_t batch, int64_t count) { return torch::randint(count, {batch}); }

// Each in a process of its own, so that what libtorch has done stays out of the one that others
// fork.

TEST(Measure, AnMlpKeepsWhatIsCounted) {
  test::isolated([] {
    for (const char* activation : {"relu", "gelu", "silu", "tanh"}) {
      for (const double dropout : {0.0, 0.1}) {
        models::Mlp net(models::MlpOptions{.sizes = {784, 256, 128, 10},
                                           .activation = models::activation_named(activation),
                                           .dropout = dropout});
        const auto x = torch::randn({64, 784});
        const auto y = classes(64, 10);
        const auto profile = profile_of({.model = {.kind = "mlp",
                                                   .mlp = {.hidden = {256, 128},
                                                           .activation = activation,
                                                           .dropout = dropout}}},
                                        {{784}, 10});
        expect_as_counted(
            *net, [&] { return torch::nn::functional::cross_entropy(net->forward(x), y); }, profile,
            64);
      }
    }
  });
}

TEST(Measure, AConvNetAndAResNetKeepWhatIsCounted) {
  test::isolated([] {
    const auto x = torch::randn({8, 3, 32, 32});
    const auto y = classes(8, 10);
    for (const bool batch_norm : {true, false}) {
      models::ConvNet net(
          models::ConvNetOptions{.in_channels = 3, .channels = {16, 32}, .batch_norm = batch_norm});
      const auto profile =
          profile_of({.model = {.kind = "convnet",
                                .convnet = {.channels = {16, 32}, .batch_norm = batch_norm}}},
                     {{3, 32, 32}, 10});
      int64_t elements = 0, buffers = 0;
      for (const auto& one : net->parameters()) elements += one.numel();
      for (const auto& one : net->buffers()) buffers += one.numel();
      EXPECT_EQ(profile.elements(), elements);
      EXPECT_EQ(profile.buffer_elements, buffers);
      expect_as_counted(
          *net, [&] { return torch::nn::functional::cross_entropy(net->forward(x), y); }, profile,
          8, Recomputed::Nothing, kConvolutions);
    }
    models::ResNet18 resnet(models::ResNet18Options{.classes = 10, .small_images = true});
    expect_as_counted(
        *resnet, [&] { return torch::nn::functional::cross_entropy(resnet->forward(x), y); },
        profile_of({.model = {.kind = "resnet18"}}, {{3, 32, 32}, 10}), 8);
  });
}

// Under Autocast, as the trainer has it: for the loss alone. Convolutions keep narrow copies of
// their weights until their backward, and linear layers but a first one; a plan counts copies of
// all parameters, as Autocast holds them in forward.
void expect_as_counted_narrow(torch::nn::Module& net, const at::Tensor& x, const at::Tensor& y,
                              const std::function<at::Tensor(at::Tensor)>& forward,
                              train::RunConfig config, const SampleSizes& sample) {
  const auto loss = [&] {
    const Autocast autocast(at::kCPU, at::kBFloat16);
    return torch::nn::functional::cross_entropy(forward(x).to(at::kFloat), y);
  };
  config.mixed_precision.dtype = "bf16";
  const auto profile = profile_of(config, sample);
  double elements = 0, copies = 0;
  bool is_first = true;
  for (const auto& parameter : net.parameters()) {
    const auto numbers = static_cast<double>(parameter.numel());
    elements += numbers;
    if (parameter.dim() == 4 || (parameter.dim() == 2 && !is_first)) copies += 2 * numbers;
    is_first = false;
  }
  measure_pass(net, loss, 0);
  const auto measured = measure_pass(net, loss, 0);
  const Training training = {.batch = x.size(0), .precision = Precision::Narrow, .state_bytes = 0};
  const auto memory = memory_of(profile, training, Strategy::Ddp, this_host(), 1);
  EXPECT_NEAR((memory.activations + copies) / measured.kept, 1, kKeptWithin)
      << profile.name << ": counted " << memory.activations << " and " << copies << ", measured "
      << measured.kept;
  const double states = 16 * elements;
  EXPECT_NEAR((states + copies + memory.activations + memory.working) / (states + measured.peak), 1,
              kConvolutions)
      << profile.name << ": measured " << measured.peak << " beside " << states;
}

TEST(Measure, NarrowModelsKeepWhatIsCounted) {
  test::isolated([] {
    const auto images = torch::randn({8, 3, 32, 32}), rows = torch::randn({64, 784});
    const auto y = classes(8, 10), of_rows = classes(64, 10);
    for (const char* activation : {"relu", "gelu", "tanh"}) {
      for (const double dropout : {0.0, 0.1}) {
        models::Mlp mlp(models::MlpOptions{.sizes = {784, 256, 128, 10},
                                           .activation = models::activation_named(activation),
                                           .dropout = dropout});
        expect_as_counted_narrow(*mlp, rows, of_rows,
                                 [&](const at::Tensor& x) { return mlp->forward(x); },
                                 {.model = {.kind = "mlp",
                                            .mlp = {.hidden = {256, 128},
                                                    .activation = activation,
                                                    .dropout = dropout}}},
                                 {{784}, 10});
      }
    }
    models::ConvNet net(models::ConvNetOptions{.in_channels = 3, .channels = {16, 32}});
    expect_as_counted_narrow(*net, images, y, [&](const at::Tensor& x) { return net->forward(x); },
                             {.model = {.kind = "convnet", .convnet = {.channels = {16, 32}}}},
                             {{3, 32, 32}, 10});
    models::ResNet18 resnet(models::ResNet18Options{.classes = 10, .small_images = true});
    expect_as_counted_narrow(*resnet, images, y,
                             [&](const at::Tensor& x) { return resnet->forward(x); },
                             {.model = {.kind = "resnet18"}}, {{3, 32, 32}, 10});
  });
}

models::Transformer net_of(int64_t kv_heads, bool tied) {
  return models::Transformer({.vocabulary = 500,
                              .layers = 3,
                              .hidden = 64,
                              .feed_forward = 160,
                              .heads = 4,
                              .kv_heads = kv_heads,
                              .head_dim = 16,
                              .tied = tied});
}

TEST(Measure, ATransformerKeepsWhatIsCounted) {
  test::isolated([] {
    for (const int64_t kv_heads : {4, 2}) {
      auto net = net_of(kv_heads, kv_heads == 4);
      const auto ids = torch::randint(500, {8, 96}), targets = torch::randint(500, {8, 96});
      const auto loss = [&] { return lockstep::call(net, ids, targets); };
      const auto profile = transformer_profile(sizes_of(net->options), 96, Precision::Float);
      expect_as_counted(*net, loss, profile, 8);
      {
        const ActivationCheckpointing again(net->recomputed(models::Recomputed::Selective));
        expect_as_counted(*net, loss, profile, 8, Recomputed::Cheap);
      }
      const ActivationCheckpointing again(net->recomputed(models::Recomputed::Full));
      expect_as_counted(*net, loss, profile, 8, Recomputed::Blocks);
    }
  });
}

TEST(Measure, ANarrowTransformerKeepsWhatIsCounted) {
  test::isolated([] {
    auto net = net_of(2, true);
    net->to(at::kBFloat16);
    const auto ids = torch::randint(500, {8, 96}), targets = torch::randint(500, {8, 96});
    expect_as_counted(
        *net, [&] { return lockstep::call(net, ids, targets); },
        transformer_profile(sizes_of(net->options), 96, Precision::Narrow), 8);
  });
}

TEST(Measure, AModuleOfTheProgramsOwnIsMeasured) {
  test::isolated([] {
    models::Mlp net(models::MlpOptions{.sizes = {784, 256, 10}});
    const auto measured =
        measure(*net,
                [&](int64_t batch) {
                  return torch::nn::functional::cross_entropy(
                      net->forward(torch::randn({batch, 784})), classes(batch, 10));
                },
                {.batch = 32});
    const auto counted = profile_of({.model = {.kind = "mlp"}}, {{784}, 10});
    EXPECT_EQ(measured.elements(), counted.elements());
    EXPECT_NEAR(measured.forward_flops() / counted.forward_flops(), 1, 0.01);
  });
}

// From the units' memory follows what the whole needs when they are recomputed.
TEST(Measure, UnitsAreMeasuredOneByOne) {
  test::isolated([] {
    auto net = net_of(2, true);
    const auto loss = [&](int64_t batch) {
      return lockstep::call(net, torch::randint(500, {batch, 96}),
                            torch::randint(500, {batch, 96}));
    };
    const auto blocks = net->recomputed(models::Recomputed::Full);
    const auto profile = measure(*net, loss, {.batch = 4, .units = blocks, .tokens = 96});
    ASSERT_EQ(profile.units.size(), 5) << "what is before, three blocks, and the rest";
    const auto counted = transformer_profile(sizes_of(net->options), 96, Precision::Float);
    EXPECT_EQ(profile.units[1].elements(), counted.units[1].elements());
    EXPECT_NEAR(profile.units[1].flops / counted.units[1].flops, 1, 0.02);
    const auto memory = [&](Recomputed recomputed) {
      const Training training = {.batch = 8, .recomputed = recomputed, .state_bytes = 0};
      return memory_of(profile, training, Strategy::Ddp, this_host(), 1);
    };
    const auto kept = measure_pass(
        *net, [&] { return loss(8); }, 1);
    EXPECT_GT(kept.seconds, 0);
    EXPECT_NEAR(memory(Recomputed::Nothing).activations / kept.kept, 1, kKeptWithin);
    const auto both = memory(Recomputed::Nothing);
    EXPECT_NEAR((both.activations + both.working) / kept.peak, 1, kPeakWithin);
    const ActivationCheckpointing again(blocks);
    const auto twice = measure_pass(
        *net, [&] { return loss(8); }, 0);
    const auto planned = memory(Recomputed::Blocks);
    EXPECT_NEAR(planned.activations / twice.kept, 1, kPeakWithin);
    EXPECT_NEAR((planned.activations + planned.working) / twice.peak, 1, kPeakWithin);
  });
}

// Of three blocks the last is trained, and the head.
TEST(Measure, FrozenUnitsHaveNoBackward) {
  test::isolated([] {
    auto net = net_of(2, false);
    const auto blocks = net->recomputed(models::Recomputed::Full);
    int64_t frozen = 0;
    for (const auto& item : net->named_parameters()) {
      const auto& name = item.key();
      const bool is_trained =
          name.find("layers.2.") != name.npos || name.find("lm_head") != name.npos;
      item.value().set_requires_grad(is_trained);
      if (!is_trained) frozen += item.value().numel();
    }
    const auto loss = [&](int64_t batch) {
      return lockstep::call(net, torch::randint(500, {batch, 96}),
                            torch::randint(500, {batch, 96}));
    };
    const auto profile = measure(*net, loss, {.batch = 4, .units = blocks, .tokens = 96});
    ASSERT_EQ(profile.units.size(), 5) << "what is before, three blocks, and the rest";
    EXPECT_EQ(profile.elements() - profile.trained(), frozen);
    EXPECT_LT(profile.trained(), profile.elements() / 2);
    const auto is_gone_through = [&](size_t block) {
      return profile.units[1 + block].has_backward;
    };
    EXPECT_FALSE(is_gone_through(0));
    EXPECT_FALSE(is_gone_through(1));
    EXPECT_TRUE(is_gone_through(2));
    for (const auto recomputed : {Recomputed::Nothing, Recomputed::Blocks}) {
      std::optional<ActivationCheckpointing> again;
      if (recomputed == Recomputed::Blocks) again.emplace(blocks);
      const auto pass = measure_pass(
          *net, [&] { return loss(8); }, 0);
      const Training training = {.batch = 8, .recomputed = recomputed};
      const auto memory = memory_of(profile, training, Strategy::Ddp, this_host(), 2);
      EXPECT_NEAR(memory.activations / pass.kept, 1, kPeakWithin);
      EXPECT_NEAR((memory.activations + memory.working) / pass.peak, 1, kPeakWithin);
      EXPECT_DOUBLE_EQ(memory.optimizer, 8 * static_cast<double>(profile.trained()));
    }
  });
}

struct InsideImpl : torch::nn::Module {
  InsideImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{nullptr};
};

TEST(Measure, WhatCannotBeMeasuredIsRefused) {
  test::isolated([] {
    InsideImpl net;
    const auto loss = [&](int64_t batch) { return net.forward(torch::randn({batch, 4})).sum(); };
    const auto said = [&](const MeasureOptions& options) {
      try {
        measure(net, loss, options);
      } catch (const ConfigError& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    using testing::HasSubstr;
    EXPECT_THAT(said({.batch = 0}), HasSubstr("a batch below 1"));
    EXPECT_THAT(said({.units = {torch::nn::Linear(4, 4).ptr()}}), HasSubstr("is not one of"));
    EXPECT_THAT(said({.units = {net.linear.ptr()}}), HasSubstr("is not called through"));
    struct Outside : torch::nn::Module {
      Outside() { inside = register_module("inside", std::make_shared<InsideImpl>()); }
      std::shared_ptr<InsideImpl> inside;
    } outside;
    EXPECT_THAT(
        [&] {
          measure(outside, loss, {.units = {outside.inside, outside.inside->linear.ptr()}});
        },
        testing::ThrowsMessage<ConfigError>(HasSubstr("is within unit")));
  });
}

}  // namespace
}  // namespace lockstep::plan

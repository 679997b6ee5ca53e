// The transformer divided among ranks: the bits of Ddp, in every way of training it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "lockstep/models/generate.h"
#include "lockstep/models/transformer.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/fused_adam.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using models::Recomputed;
using models::Transformer;

Transformer small_transformer(bool tied = true, double dropout = 0) {
  torch::manual_seed(3);
  return Transformer({.vocabulary = 80,
                      .layers = 3,
                      .hidden = 32,
                      .heads = 4,
                      .kv_heads = 2,
                      .max_length = 32,
                      .tied = tied,
                      .initial_deviation = 0.2,
                      .dropout = dropout});
}

at::Tensor text_of(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  return at::randint(80, {2, 13}, generator, at::kLong);
}

struct Way {
  bool tied = true, autocast = false;
  double dropout = 0;
  std::optional<Recomputed> recomputed;
};

at::Tensor loss_of(Transformer& net, const at::Tensor& ids, const Way& way) {
  std::optional<Autocast> narrow;
  if (way.autocast) narrow.emplace(at::kCPU, at::kBFloat16);
  return lockstep::call(net, ids.slice(1, 0, 12), ids.slice(1, 1));
}

std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const Transformer& net) {
  return parallel::units_of<models::TransformerBlockImpl>(*net);
}

void expect_as_ddp(const Way& way, const FsdpOptions& options) {
  spawn(2, [&](World& world) {
    Transformer net = small_transformer(way.tied, way.dropout),
                usual = small_transformer(way.tied, way.dropout);
    std::optional<ActivationCheckpointing> again, usual_again;
    if (way.recomputed) {
      again.emplace(net->recomputed(*way.recomputed));
      usual_again.emplace(usual->recomputed(*way.recomputed));
    }
    FsdpOptions divided = options;
    divided.units = blocks_of(net);
    Fsdp fsdp(net, world.group(), divided);
    Ddp ddp(usual, world.group());
    FusedAdamW adam(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
    FusedAdamW usual_adam(usual->parameters(), torch::optim::AdamWOptions(0.01));
    const auto step_of = [&](Transformer& model, auto& attached, auto& optimizer, int step) {
      torch::manual_seed(static_cast<uint64_t>(50 + 10 * step + world.rank()));
      attached.zero_grad();
      {
        const auto hold = attached.hold();
        loss_of(model, text_of(world.rank(), 10 + step), way).backward();
      }
      const at::Tensor loss = loss_of(model, text_of(world.rank(), step), way);
      loss.backward();
      optimizer.step();
      return loss.item<double>();
    };
    for (int step = 0; step < 2; ++step) {
      const double loss = step_of(net, fsdp, adam, step);
      EXPECT_EQ(loss, step_of(usual, ddp, usual_adam, step)) << step;
    }
    EXPECT_EQ(fsdp.fingerprint(), ddp.fingerprint());
  });
}

TEST(TransformerFsdp, HasTheBitsOfDdp) {
  for (const bool share : {true, false}) {
    expect_as_ddp({}, {.share_memory = share});
    expect_as_ddp({.tied = false, .dropout = 0.2}, {.share_memory = share});
  }
  expect_as_ddp({}, {.sharding = parallel::Sharding::Gradients, .share_memory = false});
  expect_as_ddp({}, {.shard_ranks = 1});
}

TEST(TransformerFsdp, HasTheBitsOfDdpWithRecomputedBlocksAndAutocast) {
  for (const bool share : {true, false}) {
    expect_as_ddp({.dropout = 0.2, .recomputed = Recomputed::Full}, {.share_memory = share});
    expect_as_ddp({.autocast = true, .recomputed = Recomputed::Selective}, {.share_memory = share});
  }
}

// Adapters beside frozen weights, as LoRA has them.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() {
    net = register_module("net", small_transformer());
    for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
    torch::manual_seed(4);
    down = register_module("down", torch::nn::Linear(32, 4));
    up = register_module("up", torch::nn::Linear(4, 32));
  }
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor x = call(net->model->block(0), torch::embedding(net->head_weight(), ids),
                              torch::ones({1, ids.size(1), 8}), torch::zeros({1, ids.size(1), 8}));
    return net->head(x + call(up, call(down, x)));
  }
  Transformer net{nullptr};
  torch::nn::Linear down{nullptr}, up{nullptr};
};
TORCH_MODULE(Adapted);

TEST(TransformerFsdp, TrainsAdaptersOfFrozenWeights) {
  for (const bool share : {true, false}) {
    spawn(2, [&](World& world) {
      const Adapted net, usual;
      auto units = blocks_of(net->net);
      units.push_back(net->down.ptr());
      units.push_back(net->up.ptr());
      Fsdp fsdp(net, world.group(), {.units = units, .share_memory = share});
      Ddp ddp(usual, world.group());
      std::vector<at::Tensor> trained, usual_trained;
      for (const auto& leaf : fsdp.parameters()) {
        if (leaf.requires_grad()) trained.push_back(leaf);
      }
      for (const auto& leaf : usual->parameters()) {
        if (leaf.requires_grad()) usual_trained.push_back(leaf);
      }
      EXPECT_EQ(trained.size(), 4U);
      FusedAdamW adam(trained, torch::optim::AdamWOptions(0.01));
      FusedAdamW usual_adam(usual_trained, torch::optim::AdamWOptions(0.01));
      for (int step = 0; step < 2; ++step) {
        const at::Tensor ids = text_of(world.rank(), step);
        fsdp.zero_grad();
        ddp.zero_grad();
        call(net, ids).square().mean().backward();
        call(usual, ids).square().mean().backward();
        adam.step();
        usual_adam.step();
      }
      EXPECT_EQ(fsdp.fingerprint(), ddp.fingerprint());
    });
  }
}

TEST(TransformerFsdp, GeneratesOtherTextsOnEachRank) {
  for (const bool share : {true, false}) {
    spawn(2, [&](World& world) {
      Transformer net = small_transformer();
      Transformer usual = small_transformer();
      Fsdp fsdp(net, world.group(), {.units = blocks_of(net), .share_memory = share});
      fsdp.unshard();
      const std::vector<std::vector<int32_t>> prompts{{1, 2, 3 + world.rank()}};
      const models::GenerateOptions options{.max_new_tokens = 4 + world.rank()};
      EXPECT_EQ(models::generate(net, prompts, options), models::generate(usual, prompts, options));
      fsdp.reshard();
      loss_of(net, text_of(world.rank(), 0), {}).backward();
      for (const auto& leaf : fsdp.parameters()) EXPECT_TRUE(leaf.grad().defined());
    });
  }
}

}  // namespace
}  // namespace lockstep::test

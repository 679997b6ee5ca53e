// The transformer under what trains it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/models/transformer.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fused_adam.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using models::Recomputed;
using models::Transformer;

Transformer made(at::ScalarType dtype, double dropout = 0) {
  torch::manual_seed(3);
  Transformer net({.vocabulary = 40,
                   .layers = 3,
                   .hidden = 16,
                   .heads = 4,
                   .kv_heads = 2,
                   .max_length = 32,
                   .initial_deviation = 0.2,
                   .dropout = dropout});
  net->to(dtype);
  return net;
}

at::Tensor batch(int64_t rows) {
  return torch::arange(rows * 13).mul(11).remainder(40).view({rows, 13});
}

at::Tensor loss_of(Transformer& net, const at::Tensor& ids) {
  return lockstep::call(net, ids.slice(1, 0, 12), ids.slice(1, 1));
}

std::vector<at::Tensor> gradients_of(Transformer& net) {
  std::vector<at::Tensor> out;
  for (const auto& parameter : net->parameters()) out.push_back(parameter.grad().clone());
  return out;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                  double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), tolerance) << i;
}

// One step of two ranks against one process with both batches.
void expect_as_one_process(bool autocast, bool recompute) {
  spawn(2, [&](World& world) {
    const auto dtype = autocast ? at::kFloat : at::kDouble;
    const auto step = [&](Transformer& net, const at::Tensor& ids) {
      std::optional<ActivationCheckpointing> again;
      if (recompute) again.emplace(net->recomputed(Recomputed::Full));
      at::Tensor loss;
      {
        std::optional<Autocast> narrow;
        if (autocast) narrow.emplace(at::kCPU, at::kBFloat16);
        loss = loss_of(net, ids);
      }
      loss.backward();
    };
    const at::Tensor all = batch(4);
    Transformer alone = made(dtype);
    step(alone, all);
    Transformer net = made(dtype);
    Ddp ddp(net, world.group());
    step(net, all.slice(0, 2 * world.rank(), 2 * world.rank() + 2));
    expect_equal(gradients_of(net), gradients_of(alone), autocast ? 2e-2 : 1e-12);
  });
}

TEST(TransformerParallel, DdpOfATiedHeadIsOneProcess) { expect_as_one_process(false, false); }
TEST(TransformerParallel, DdpWithRecomputedBlocksIsOneProcess) {
  expect_as_one_process(false, true);
}
TEST(TransformerParallel, DdpInBfloat16IsNearOneProcess) { expect_as_one_process(true, true); }

TEST(ActivationCheckpointing, GradientsAreTheSameWithDropoutAndAutocast) {
  isolated([] {
    const auto gradients = [](std::optional<Recomputed> kind, int64_t every, bool autocast) {
      Transformer net = made(at::kFloat, 0.3);
      std::optional<ActivationCheckpointing> recompute;
      if (kind) recompute.emplace(net->recomputed(*kind, every));
      torch::manual_seed(5);
      for (int i = 0; i < 2; ++i) {  // gradients add up
        at::Tensor loss;
        {
          std::optional<Autocast> narrow;
          if (autocast) narrow.emplace(at::kCPU, at::kBFloat16);
          loss = loss_of(net, batch(2));
        }
        loss.backward();
      }
      auto out = gradients_of(net);
      out.push_back(torch::rand({1}));  // as many numbers were drawn
      return out;
    };
    for (const bool autocast : {false, true}) {
      const auto plain = gradients(std::nullopt, 1, autocast);
      expect_equal(gradients(Recomputed::Full, 1, autocast), plain, 0);
      expect_equal(gradients(Recomputed::Full, 2, autocast), plain, 0);
      // A norm uses its input twice, and the block once more: sums in another order.
      expect_equal(gradients(Recomputed::Selective, 1, autocast), plain, 5e-6);
    }
  });
}

TEST(ActivationCheckpointing, ParametersGetGradientsWhereTheInputHasNone) {
  isolated([] {
    Transformer net = made(at::kFloat);
    net->model->embed_tokens->weight.set_requires_grad(false);
    const ActivationCheckpointing recompute(net->recomputed(Recomputed::Full));
    loss_of(net, batch(2)).backward();
    for (const auto& item : net->named_parameters()) {
      EXPECT_EQ(item.value().grad().defined(), item.value().requires_grad()) << item.key();
    }
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(loss_of(net, batch(2)).requires_grad());
  });
}

TEST(ActivationCheckpointing, EndsWithTheObject) {
  isolated([] {
    Transformer net = made(at::kFloat);
    std::string function;
    const auto name = [&] {
      const at::Tensor x = torch::randn({1, 2, 16}).set_requires_grad(true);
      return lockstep::call(net->model->norm, x).grad_fn()->name();
    };
    const std::string plain = name();
    {
      const ActivationCheckpointing recompute({net->model->norm.ptr()});
      EXPECT_NE(name(), plain);
    }
    EXPECT_EQ(name(), plain);
  });
}

TEST(TransformerParallel, Learns) {
  isolated([] {
    Transformer net = made(at::kFloat);
    FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
    double first = 0, last = 0;
    for (int step = 0; step < 30; ++step) {
      net->zero_grad();
      const at::Tensor loss = loss_of(net, batch(4));
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
      if (step == 0) first = last;
    }
    EXPECT_LT(last, first / 4);
  });
}

}  // namespace
}  // namespace lockstep::test

// Sparse gradients of embeddings.
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/join.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

struct Words : torch::nn::Module {
  explicit Words(bool sparse, at::ScalarType dtype = at::kFloat) {
    torch::manual_seed(0);
    table = register_module(
        "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(40, 4).sparse(sparse)));
    head = register_module("head", torch::nn::Linear(4, 2));
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& words) { return head(table(words)); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};

// Ranks share word 0; word 1 comes twice on each.
at::Tensor words_of(int rank) { return torch::tensor({0, 1, 1, 2 + rank, 10 + 3 * rank}); }
at::Tensor words_loss(Words& net, int rank) { return net.forward(words_of(rank)).square().sum(); }

class SparseWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SparseWorlds, ::testing::ValuesIn(kWorlds),
                         ::testing::PrintToStringParamName());

TEST_P(SparseWorlds, B54_TheAverageHasTheBitsOfADenseOne) {
  for (const std::string backend : {"shm", "gloo"}) {
    if (backend == "shm" || GetParam() > 1) {
      spawn(GetParam(),
            [](World& world) {
              for (const auto dtype : {at::kFloat, at::kDouble}) {
                Words sparse(true, dtype), dense(false, dtype);
                Ddp one(sparse, world.group()), other(dense, world.group());
                for (int pass = 0; pass < 2; ++pass) {
                  one.zero_grad();
                  other.zero_grad();
                  words_loss(sparse, world.rank()).backward();
                  words_loss(dense, world.rank()).backward();
                  ASSERT_TRUE(sparse.table->weight.grad().is_sparse());
                  const at::Tensor got = sparse.table->weight.grad().to_dense();
                  if (world.group().deterministic()) {
                    EXPECT_TRUE(at::equal(got, dense.table->weight.grad()));
                  } else {
                    EXPECT_TRUE(at::allclose(got, dense.table->weight.grad(), 1e-6, 1e-8));
                  }
                  EXPECT_TRUE(at::allclose(sparse.head->weight.grad(), dense.head->weight.grad(),
                                           1e-6, 1e-8));
                }
              }
            },
            {.backend = GetParam() == 1 ? "auto" : backend});
    }
  }
}

TEST_P(SparseWorlds, B54_AccumulatesUnderHoldAndStepsWithAnOptimizer) {
  spawn(GetParam(), [](World& world) {
    Words sparse(true), dense(false);
    Ddp one(sparse, world.group()), other(dense, world.group());
    torch::optim::SGD sgd(sparse.parameters(), 0.1), usual(dense.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      one.zero_grad();
      other.zero_grad();
      {
        const auto hold = one.hold();
        const auto same = other.hold();
        words_loss(sparse, world.rank() + 1).backward();
        words_loss(dense, world.rank() + 1).backward();
      }
      words_loss(sparse, world.rank()).backward();
      words_loss(dense, world.rank()).backward();
      sgd.step();
      usual.step();
    }
    // Doubled words are added in another order.
    EXPECT_TRUE(at::allclose(sparse.table->weight, dense.table->weight, 1e-5, 1e-6));
  });
}

TEST(Sparse, B54_ATableThatOneRankDoesNotReachIsAveragedAndOneThatNobodyReachesIsNotTouched) {
  spawn(2, [](World& world) {
    Words net(true);
    Ddp ddp(net, world.group());
    ddp.zero_grad();
    const at::Tensor loss =
        world.rank() == 0 ? words_loss(net, 0) : net.head(at::ones({1, 4})).sum();
    loss.backward();
    Words alone(true);
    words_loss(alone, 0).backward();
    EXPECT_TRUE(
        at::equal(net.table->weight.grad().to_dense(), alone.table->weight.grad().to_dense() / 2));
    ddp.zero_grad();
    net.head(at::ones({1, 4})).sum().backward();
    EXPECT_FALSE(net.table->weight.grad().defined());
  });
}

TEST(Sparse, WhatAnEarlierBackwardLeftCountsOnARankThatDoesNotReachTheTable) {
  spawn(2, [](World& world) {
    Words sparse(true), dense(false);
    Ddp one(sparse, world.group()), other(dense, world.group());
    for (int pass = 0; pass < 2; ++pass) {
      for (Words* net : {&sparse, &dense}) {
        (world.rank() == 0 ? words_loss(*net, 0) : net->head(at::ones({1, 4})).sum()).backward();
      }
    }
    EXPECT_TRUE(at::equal(sparse.table->weight.grad().to_dense(), dense.table->weight.grad()));
  });
}

// Rank 2 has no batch; rank 0, which speaks for what there was before, does not reach the table in
// the second backward.
TEST(Sparse, WhatAnEarlierBackwardLeftIsRefusedWithinAJoin) {
  spawn(3, [](World& world) {
    Words net(true);
    Ddp ddp(net, world);
    Join join({ddp});
    const auto message = message_of<ConfigError>([&] {
      for (int pass = 0; world.rank() < 2 && pass < 2; ++pass) {
        const bool reaches = pass == 0 || world.rank() == 1;
        (reaches ? words_loss(net, 0) : net.head(at::ones({1, 4})).sum()).backward();
      }
      join.finish();
    });
    EXPECT_THAT(message, ::testing::HasSubstr("'table.weight' has a sparse gradient and got one"));
  });
}

// zero_grad(false) leaves a gradient without entries.
TEST(Sparse, AGradientThatWasZeroedCountsAsNoneWithinAJoin) {
  spawn(3, [](World& world) {
    for (const auto divisor : {Divisor::World, Divisor::Active}) {
      Words sparse(true), dense(false);
      for (Words* net : {&sparse, &dense}) {
        Ddp ddp(*net, world);
        torch::optim::SGD sgd(net->parameters(), 0.1);
        const auto step = [&] {
          sgd.zero_grad(/*set_to_none=*/false);
          words_loss(*net, world.rank()).backward();
          sgd.step();
        };
        step();
        Join join({ddp}, {.divisor = divisor});
        for (int i = 0; i < world.rank(); ++i) step();
        join.finish([&] { sgd.step(); });
      }
      EXPECT_TRUE(at::allclose(sparse.table->weight, dense.table->weight, 1e-5, 1e-6));
    }
  });
}

// Nor does the pass leave a trace in what a hook carries.
TEST(Sparse, WhatIsRefusedWithinAJoinLeavesAHooksState) {
  spawn(3, [](World& world) {
    Words net(true);
    const auto hook =
        std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true});
    Ddp ddp(net, world, {.hook = hook});
    Join join({ddp});
    std::map<std::string, at::Tensor> before;
    EXPECT_THROW(
        {
          for (int pass = 0; world.rank() < 2 && pass < 2; ++pass) {
            words_loss(net, world.rank()).backward();
            for (const auto& [name, tensor] : hook->state()) {
              if (pass == 0) before[name] = tensor.clone();
            }
          }
          join.finish();
        },
        ConfigError);
    const auto after = hook->state();
    if (world.rank() == 2) return;  // which was in none of its own
    EXPECT_FALSE(before.empty());
    for (const auto& [name, tensor] : before)
      EXPECT_TRUE(at::equal(after.at(name), tensor)) << name;
  });
}

TEST(Sparse, B54_AModuleWithNothingElse) {
  spawn(2, [](World& world) {
    torch::nn::EmbeddingBag bag(
        torch::nn::EmbeddingBagOptions(8, 2).sparse(true).mode(torch::kSum));
    Ddp ddp(*bag, world.group());
    EXPECT_TRUE(ddp.buckets().empty());
    bag->forward(torch::tensor({{int64_t{world.rank()}, int64_t{7}}})).sum().backward();
    const at::Tensor got = bag->weight.grad().to_dense();
    EXPECT_TRUE(
        at::equal(got.select(1, 0), torch::tensor({0.5F, 0.5F, 0.F, 0.F, 0.F, 0.F, 0.F, 1.F})));
  });
}

TEST(Sparse, B54_AParameterOfOnesOwnIsNamedInTheOptions) {
  struct Own : torch::nn::Module {
    Own() { table = register_parameter("table", at::ones({6, 2})); }
    at::Tensor table;
  };
  spawn(2, [](World& world) {
    const auto pass = [&](Own& own) {
      at::embedding(own.table, torch::tensor({int64_t{world.rank()}}), -1, false, /*sparse=*/true)
          .sum()
          .backward();
    };
    Own own;
    {
      Ddp ddp(own, world.group());
      EXPECT_THAT([&] { pass(own); }, ::testing::ThrowsMessage<ConfigError>(
                                          ::testing::HasSubstr("DdpOptions::sparse")));
    }
    own.zero_grad();
    Ddp ddp(own, world.group(), {.sparse = {"table"}});
    pass(own);
    EXPECT_EQ(own.table.grad().to_dense().sum().item<float>(), 2.F);
    EXPECT_THROW(Ddp(own, world.group(), {.sparse = {"tabel"}}), ConfigError);
  });
}

TEST(Sparse, B48_GoesPastAHook) {
  spawn(2, [](World& world) {
    Words net(true), plain(true);
    Ddp ddp(net, world.group(), {.hook = std::make_shared<CastHook>(at::kBFloat16)});
    Ddp other(plain, world.group());
    words_loss(net, world.rank()).backward();
    words_loss(plain, world.rank()).backward();
    EXPECT_TRUE(
        at::equal(net.table->weight.grad().to_dense(), plain.table->weight.grad().to_dense()));
  });
}

TEST(Sparse, UnusedErrorCountsATableThatWasReachedLast) {
  spawn(2, [](World& world) {
    Words net(true);
    Ddp ddp(net, world.group(), {.unused = Unused::Error});
    EXPECT_NO_THROW(words_loss(net, world.rank()).backward());
    ddp.zero_grad();
    EXPECT_THAT(
        [&] {
          net.head(at::ones({1, 4})).sum().backward();
        },
        ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("table.weight")));
  });
}

// What only rank 1 of 3 does wrong all ranks are told, and the next pass is right.
TEST(Sparse, AGradientThatDoesNotFitOnOneRankIsRefusedOnAll) {
  struct Own : torch::nn::Module {
    Own() { table = register_parameter("table", at::ones({6, 2})); }
    at::Tensor table;
  };
  // A gradient of its choice for the table.
  struct Gives : torch::autograd::Function<Gives> {
    static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& table,
                              const at::Tensor& gradient) {
      ctx->saved_data["gradient"] = gradient;
      return table.sum();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   const torch::autograd::variable_list&) {
      return {ctx->saved_data["gradient"].toTensor(), at::Tensor()};
    }
  };
  spawn(3, [](World& world) {
    const auto rows = [](int64_t row) {
      return at::sparse_coo_tensor(torch::tensor({{row}}), at::ones({1, 2}), {6, 2});
    };
    const auto outside =
        at::_sparse_coo_tensor_unsafe(torch::tensor({{int64_t{9}}}), at::ones({1, 2}), {6, 2});
    Own own;
    Ddp ddp(own, world.group(), {.sparse = {"table"}});
    const auto refused = [&](const at::Tensor& bad) {
      ddp.zero_grad();
      return message_of<ConfigError>([&] {
        Gives::apply(own.table, world.rank() == 1 ? bad : rows(world.rank())).backward();
      });
    };
    EXPECT_THAT(refused(at::ones({6, 2})),
                ::testing::HasSubstr("rank 1: the gradient of parameter 'table' is dense"));
    EXPECT_THAT(refused(at::eye(6, 2).to_sparse()),
                ::testing::HasSubstr("has 2 sparse dimensions on rank 1 and 1 on a rank below"));
    EXPECT_THAT(refused(outside), ::testing::HasSubstr("'table' on rank 1 has indices outside"));
    EXPECT_EQ(refused(rows(5)), "nothing");
    EXPECT_EQ(own.table.grad().to_dense().sum().item<float>(), 2.F);
  });
}

}  // namespace
}  // namespace lockstep::test

// Collectives within the graph: losses over all ranks' samples have the gradients that one process
// computes on the whole batch.
#include "lockstep/parallel/functional.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/lockstep.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

constexpr int64_t kFeatures = 5;

at::Tensor rows_of_rank(int rank, int64_t rows = 3, int64_t step = 0) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * step + rank));
  return at::randn({rows, kFeatures}, generator, at::kDouble);
}

// Different for each element, the same on every rank.
at::Tensor weights_like(const at::Tensor& tensor) {
  return at::arange(1, tensor.numel() + 1, at::kDouble).view_as(tensor).sin();
}

// Embeddings, and a temperature that the loss applies to what was gathered.
struct PairsImpl : torch::nn::Module {
  PairsImpl() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(kFeatures, 8));
    second = register_module("second", torch::nn::Linear(8, 4));
    temperature = register_parameter("temperature", torch::ones({}));
    this->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::nn::functional::normalize(second(lockstep::call(first, x).tanh()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor temperature;
};
TORCH_MODULE(Pairs);

// Each row of `left` belongs to the same one of `right`.
at::Tensor contrastive_loss(const at::Tensor& left, const at::Tensor& right,
                            const at::Tensor& temperature) {
  const auto targets = torch::arange(left.size(0));
  return torch::nn::functional::cross_entropy(left.mm(right.t()) * temperature.exp(), targets);
}

int64_t uneven(int rank) { return 2 + 3 * (rank % 3); }

class Functional : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(Worlds, Functional,
                         ::testing::Values(Ranks{"shm", 1}, Ranks{"shm", 2}, Ranks{"shm", 3},
                                           Ranks{"tcp", 3}, Ranks{"gloo", 2},
                                           Ranks{"auto", 3, {0, 0, 1}}),
                         name_of);

TEST_P(Functional, AContrastiveLossTrainsAsInOneProcess) {
  spawn(GetParam(), [](World& world) {
    Pairs net, usual;
    Ddp ddp(net, world);
    torch::optim::SGD sgd(net->parameters(), 0.1), usual_sgd(usual->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < world.size(); ++rank) {
        all.push_back(rows_of_rank(rank, uneven(rank), step));
      }
      ddp.zero_grad();
      const at::Tensor mine = all[static_cast<size_t>(world.rank())];
      const auto left = functional::all_gather(net->forward(mine), world.group());
      const auto right = functional::all_gather(net->forward(mine * 0.9), world.group());
      contrastive_loss(left, right, net->temperature).backward();
      sgd.step();

      usual_sgd.zero_grad();
      const at::Tensor whole = at::cat(all);
      contrastive_loss(usual->forward(whole), usual->forward(whole * 0.9), usual->temperature)
          .backward();
      usual_sgd.step();
    }
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(net->parameters()[i], usual->parameters()[i], 1e-9, 1e-9)) << i;
    }
  });
}

// The gradient with respect to each rank's rows is that of the sum of the ranks' losses.
TEST_P(Functional, EachHasTheGradientOfTheSumOfAllLosses) {
  spawn(GetParam(), [](World& world) {
    const int ranks = world.size();
    const auto me = static_cast<size_t>(world.rank());
    std::vector<at::Tensor> leaves;
    for (int rank = 0; rank < ranks; ++rank) {
      leaves.push_back(rows_of_rank(rank, 2 * ranks).requires_grad_(true));
    }
    const auto loss_of = [](const at::Tensor& result, int64_t rank) {
      return (result.pow(3) * weights_like(result)).sum() * static_cast<double>(rank + 1);
    };
    const auto expect = [&](const at::Tensor& mine_result, const at::Tensor& mine,
                            const std::function<at::Tensor(int64_t rank)>& one_process) {
      const at::Tensor got = torch::autograd::grad({loss_of(mine_result, world.rank())}, {mine})[0];
      at::Tensor total = torch::zeros({}, at::kDouble);
      for (int rank = 0; rank < ranks; ++rank) total = total + loss_of(one_process(rank), rank);
      EXPECT_TRUE(at::allclose(mine_result, one_process(world.rank())));
      EXPECT_TRUE(at::allclose(got, torch::autograd::grad({total}, {leaves[me]})[0], 1e-9, 1e-9));
    };
    const at::Tensor mine = leaves[me].detach().clone().requires_grad_(true);
    const Group& group = world.group();
    const at::Tensor sum = std::accumulate(leaves.begin() + 1, leaves.end(), leaves[0]);
    expect(functional::all_reduce(mine, group), mine, [&](int64_t) { return sum; });
    expect(functional::all_reduce(mine, group, ReduceOp::Average), mine,
           [&](int64_t) { return sum / ranks; });
    expect(functional::all_gather(mine, group), mine, [&](int64_t) { return at::cat(leaves); });
    expect(functional::reduce_scatter(mine, group), mine,
           [&](int64_t rank) { return sum.chunk(ranks)[static_cast<size_t>(rank)]; });
    expect(functional::reduce_scatter(mine, group, ReduceOp::Average), mine,
           [&](int64_t rank) { return sum.chunk(ranks)[static_cast<size_t>(rank)] / ranks; });

    // Rank r keeps r rows for itself and divides the others unevenly.
    const auto counts_of = [&](int64_t rank) {
      std::vector<int64_t> counts(static_cast<size_t>(ranks));
      for (int64_t row = 0; row < 2 * ranks; ++row) {
        ++counts[static_cast<size_t>((row * row + rank) % ranks)];
      }
      return counts;
    };
    const auto sent = functional::all_to_all(mine, counts_of(world.rank()), group);
    expect(sent.rows, mine, [&](int64_t rank) {
      std::vector<at::Tensor> parts;
      for (int64_t from = 0; from < ranks; ++from) {
        parts.push_back(leaves[static_cast<size_t>(from)].split_with_sizes(
            counts_of(from))[static_cast<size_t>(rank)]);
      }
      return at::cat(parts);
    });
    // And back, the other way round.
    const auto back = functional::all_to_all(sent.rows, sent.counts, group);
    EXPECT_TRUE(at::equal(back.rows, mine));
    EXPECT_EQ(back.counts, counts_of(world.rank()));
  });
}

TEST_P(Functional, SecondDerivativesAreThoseOfOneProcess) {
  spawn(GetParam(), [](World& world) {
    std::vector<at::Tensor> leaves;
    for (int rank = 0; rank < world.size(); ++rank) {
      leaves.push_back(rows_of_rank(rank).requires_grad_(true));
    }
    const auto penalty = [](const at::Tensor& output, const at::Tensor& leaf, double share) {
      const auto slope = torch::autograd::grad({output.pow(3).sum() * share}, {leaf}, {},
                                               /*retain_graph=*/true, /*create_graph=*/true)[0];
      return slope.pow(2).sum();
    };
    const at::Tensor& leaf = leaves[static_cast<size_t>(world.rank())];
    const at::Tensor mine = leaf.detach().clone().requires_grad_(true);
    const auto gathered = functional::all_gather(mine, world.group());
    // Every rank's loss is alike, so their sum's share is the loss.
    const auto got =
        torch::autograd::grad({penalty(gathered, mine, 1.0 / world.size())}, {mine})[0];
    const auto want = torch::autograd::grad({penalty(at::cat(leaves), leaf, 1)}, {leaf})[0];
    EXPECT_TRUE(at::allclose(got, want, 1e-9, 1e-9));
  });
}

TEST(FunctionalWith, FsdpActivationCheckpointsAndAccumulation) {
  spawn(2, [](World& world) {
    Pairs net, usual;
    const auto temperature = torch::ones({}, at::kDouble);
    Fsdp fsdp(net, world, {.units = {net->first.ptr()}});
    const ActivationCheckpointing recomputes({net->first.ptr()});
    torch::optim::SGD sgd(fsdp.parameters(), 0.1), usual_sgd(usual->parameters(), 0.1);
    for (int64_t step = 0; step < 3; ++step) {
      fsdp.zero_grad();
      usual_sgd.zero_grad();
      for (int64_t part = 0; part < 2; ++part) {
        const auto batch = [&](int rank) { return rows_of_rank(rank, 3, 2 * step + part); };
        const auto held = part == 0 ? std::optional(fsdp.hold()) : std::nullopt;
        const at::Tensor mine = batch(world.rank()), whole = at::cat({batch(0), batch(1)});
        const auto all = functional::all_gather(lockstep::call(net, mine), world.group());
        contrastive_loss(all, all.flip(1), temperature).backward();
        const auto embedded = usual->forward(whole);
        contrastive_loss(embedded, embedded.flip(1), temperature).backward();
      }
      sgd.step();
      usual_sgd.step();
    }
    fsdp.unshard();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(net->parameters()[i], usual->parameters()[i], 1e-9, 1e-9)) << i;
    }
  });
}

TEST(FunctionalRefuses, WhatHasNoMeaning) {
  using ::testing::HasSubstr;
  spawn(2, [](World& world) {
    const auto expect = [](const std::function<void()>& call, const char* text) {
      try {
        call();
        ADD_FAILURE() << "no error, but: " << text;
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), HasSubstr(text));
      }
    };
    const Group& group = world.group();
    const at::Tensor rows = rows_of_rank(world.rank());
    expect([&] { functional::all_gather(rows.narrow(1, 0, 2 + world.rank()), group); },
           "differ in more than rows");
    expect([&] { functional::all_gather(world.rank() == 0 ? rows : rows.to(at::kFloat), group); },
           "differ in more than rows");
    expect([&] { functional::all_gather(torch::ones({}), group); }, "without dimensions");
    expect([&] { functional::all_reduce(rows, group, ReduceOp::Max); }, "Sum and Average only");
    expect([&] { functional::reduce_scatter(rows, group); }, "3 rows, which 2 ranks cannot");
    expect([&] { functional::all_to_all(rows, {1, 1}, group); }, "the counts [1, 1]");
    expect([&] { functional::all_to_all(rows, {4, -1}, group); }, "the counts [4, -1]");
    expect([&] { functional::all_to_all(rows, {3}, group); }, "the counts [3]");
    // The group still works.
    EXPECT_EQ(functional::all_gather(rows, group).size(0), 6);

    const Group own = group.split(0);
    Pairs net;
    const Ddp ddp(net, world, {.lanes = 2});
    expect([&] { functional::all_gather(rows, group); }, "run 2 lanes");
    // So do those of a group that a layer has for itself, made before the Ddp or after it.
    expect([&] { functional::all_gather(rows, own); }, "run 2 lanes");
    expect([&] { functional::all_gather(rows, group.split(0)); }, "run 2 lanes");
    const Group alone = group.split(group.rank());
    EXPECT_EQ(functional::all_gather(rows, alone).size(0), 3);
  });
}

TEST(FunctionalRefuses, ARankWhoseLossDoesNotDependOnTheResult) {
  using ::testing::HasSubstr;
  spawn(2,
        [](World& world) {
          Pairs net;
          Ddp ddp(net, world);
          const at::Tensor mine = net->forward(rows_of_rank(world.rank()));
          const auto all = functional::all_gather(mine, world.group());
          try {
            (world.rank() == 0 ? all : mine).sum().backward();
            ADD_FAILURE() << "no error";
          } catch (const CommError& error) {
            EXPECT_THAT(error.what(), HasSubstr("(functional::reduce_scatter, float64 x [12,12])"));
          }
        },
        {.timeout = std::chrono::seconds(3)});
}

// Of two experts each rank uses its own, so that buckets are ready in another order on each, and
// backward() calls them and the collective of the graph in another order.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    torch::manual_seed(4);
    first = register_module("first", torch::nn::Linear(kFeatures, 8));
    experts->push_back(torch::nn::Linear(8, 8));
    experts->push_back(torch::nn::Linear(8, 8));
    register_module("experts", experts);
    last = register_module("last", torch::nn::Linear(8, 4));
    this->to(at::kDouble);
  }
  // What the loss of this rank's rows consists of: the rank's own, and a mean over all.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, int expert, const Group& group) {
    const at::Tensor hidden = first(x).tanh();
    const at::Tensor mean = functional::all_reduce(hidden.mean(0), group, ReduceOp::Average);
    const auto own = std::dynamic_pointer_cast<torch::nn::LinearImpl>(experts[expert]);
    return {last(own->forward(hidden)).square().mean(), mean};
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::ModuleList experts;
};
TORCH_MODULE(Experts);

TEST(FunctionalWith, RanksWhoseGraphsDifferInAGroupOfItsOwn) {
  spawn(2, [](World& world) {
    Experts net, usual;
    Ddp ddp(net, world, {.bucket_bytes = {1}});
    torch::optim::SGD sgd(net->parameters(), 0.1), usual_sgd(usual->parameters(), 0.1);
    const Group own = world.group().split(0), alone = World::solo().group();
    for (int64_t step = 0; step < 3; ++step) {
      ddp.zero_grad();
      const auto [loss, mean] =
          net->forward(rows_of_rank(world.rank(), 3, step), world.rank(), own);
      (loss + mean.square().sum()).backward();
      sgd.step();

      usual_sgd.zero_grad();
      const auto [loss0, mean0] = usual->forward(rows_of_rank(0, 3, step), 0, alone);
      const auto [loss1, mean1] = usual->forward(rows_of_rank(1, 3, step), 1, alone);
      ((loss0 + loss1) / 2 + ((mean0 + mean1) / 2).square().sum()).backward();
      usual_sgd.step();
    }
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(net->parameters()[i], usual->parameters()[i], 1e-9, 1e-9)) << i;
    }
  });
}

TEST(FunctionalRefuses, RanksWhoseGraphsDifferInTheGroupOfADdp) {
  spawn(2, [](World& world) {
    Experts net;
    Ddp ddp(net, world, {.bucket_bytes = {1}});
    const auto [loss, mean] = net->forward(rows_of_rank(world.rank()), world.rank(), world.group());
    const auto message = message_of<CommError>([&] { (loss + mean.square().sum()).backward(); });
    EXPECT_THAT(message, testing::HasSubstr("the ranks disagree"));
    // Rank 0 is in this call, rank 1 in one of the Ddp's.
    EXPECT_THAT(
        message,
        testing::HasSubstr(world.rank() == 0 ? "graphs differ: give it a group.split(0) of its own)"
                                             : "(functional::all_reduce, float64 x 8)"));
  });
}

TEST(FunctionalRefuses, ARankWithoutTheBatchIsToldOf) {
  spawn(2, [](World& world) {
    const auto call = [&] {
      if (world.rank() == 1) return world.group().barrier().wait();
      functional::all_reduce(at::ones({3}), world.group());
    };
    EXPECT_THAT(
        message_of<CommError>(call),
        testing::HasSubstr("(or a rank has fewer batches, or its loss leaves the result out)"));
  });
}

// In a Join a rank without a batch takes part in the Ddp's calls, and has no rows for these.
TEST(FunctionalRefuses, ARankThatHasRunOutOfBatches) {
  spawn(2, [](World& world) {
    Pairs net;
    Ddp ddp(net, world);
    Join join({ddp});
    EXPECT_THROW(
        {
          for (int64_t step = 0; step < (world.rank() == 1 ? 2 : 4); ++step) {
            ddp.zero_grad();
            const auto mine = net->forward(rows_of_rank(world.rank(), 3, step));
            functional::all_gather(mine, world.group()).square().mean().backward();
          }
          join.finish();
        },
        CommError);
  });
}

// Who calls the group itself loses the gradient.
TEST(FunctionalWith, ACallOfAGroupWarnsOfAHistory) {
  spawn(2, [](World& world) {
    const auto said = [&](const at::Tensor& tensor) {
      ::testing::internal::CaptureStderr();
      world.group().all_reduce(tensor).wait();
      return ::testing::internal::GetCapturedStderr();
    };
    const at::Tensor x = at::ones({3}).requires_grad_(true);
    EXPECT_EQ(said((2 * x).detach()), "");
    {
      const at::NoGradGuard no_grad;
      EXPECT_EQ(said(x), "");
    }
    EXPECT_EQ(said(2 * x).find("all_reduce of a tensor that has a history") != std::string::npos,
              world.rank() == 0);
    EXPECT_EQ(said(3 * x), "");  // once
  });
  spawn(2, [](World& world) {
    const at::Tensor x = at::ones({3}).requires_grad_(true);
    ::testing::internal::CaptureStderr();
    world.group().all_reduce({at::ones({3}), 2 * x}).wait();
    EXPECT_EQ(::testing::internal::GetCapturedStderr().find(
                  "all_reduce of a tensor that has a history") != std::string::npos,
              world.rank() == 0);
  });
}

}  // namespace
}  // namespace lockstep::test

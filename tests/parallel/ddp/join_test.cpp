// Ranks with unequal numbers of batches.
#include "lockstep/parallel/join.h"

#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/reference.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

// Rank r of a world has r + 1 batches, the last rank of three none.
int batches_of(int rank) { return rank == 2 ? 0 : rank + 1; }

// What one process makes of it: each step sums the gradients of the ranks that have a batch.
std::vector<at::Tensor> joined_reference(int ranks, Divisor divisor) {
  Mlp net;
  torch::optim::SGD sgd(net.parameters(), 0.1);
  for (int step = 0;; ++step) {
    std::vector<int> active;
    for (int rank = 0; rank < ranks; ++rank) {
      if (step < batches_of(rank)) active.push_back(rank);
    }
    if (active.empty()) break;
    sgd.zero_grad();
    for (int rank : active) {
      const double share =
          1.0 / (divisor == Divisor::World ? ranks : static_cast<int>(active.size()));
      (square_loss(net, rank, step) * share).backward();
    }
    sgd.step();
  }
  return net.parameters();
}

struct JoinCase {
  Ranks ranks;
  Divisor divisor;
};

class JoinWorlds : public ::testing::TestWithParam<JoinCase> {};
INSTANTIATE_TEST_SUITE_P(
    On, JoinWorlds,
    ::testing::Values(JoinCase{{"auto", 1}, Divisor::World}, JoinCase{{"shm", 2}, Divisor::World},
                      JoinCase{{"shm", 2}, Divisor::Active}, JoinCase{{"shm", 3}, Divisor::World},
                      JoinCase{{"shm", 3}, Divisor::Active}, JoinCase{{"gloo", 3}, Divisor::Active},
                      JoinCase{{"shm", 4}, Divisor::World}),
    [](const auto& instance) {
      return instance.param.ranks.name() +
             (instance.param.divisor == Divisor::World ? "World" : "Active");
    });

TEST_P(JoinWorlds, B41_B42_EveryBatchCountsAndAllModelsEndAlike) {
  spawn(GetParam().ranks, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), {.bucket_bytes = {100}});
    torch::optim::SGD sgd(net.parameters(), 0.1);
    Join join({ddp}, {.divisor = GetParam().divisor});
    for (int step = 0; step < batches_of(world.rank()); ++step) {
      ddp.zero_grad();
      square_loss(net, world.rank(), step).backward();
      sgd.step();
    }
    join.finish();
    const auto want = joined_reference(world.size(), GetParam().divisor);
    for (size_t i = 0; i < want.size(); ++i)
      EXPECT_TRUE(at::allclose(net.parameters()[i], want[i], 1e-5, 1e-6)) << i;
    for (const auto& parameter : net.parameters()) {
      at::Tensor least = parameter.detach().clone(), most = least.clone();
      world.group().all_reduce(least, ReduceOp::Min).wait();
      world.group().all_reduce(most, ReduceOp::Max).wait();
      EXPECT_TRUE(at::equal(least, most));
    }
    // And on as before.
    ddp.zero_grad();
    square_loss(net, world.rank(), 9).backward();
    EXPECT_TRUE(net.first->weight.grad().defined());
  });
}

TEST(Join, B43_ThrowTellsAllRanksInTheStepThatIsUneven) {
  spawn(3, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    Join join({ddp}, {.uneven = Uneven::Throw});
    const int mine = world.rank() == 1 ? 2 : 5;
    int done = 0;
    EXPECT_THROW(
        {
          for (; done < mine; ++done) {
            ddp.zero_grad();
            square_loss(net, world.rank(), done).backward();
          }
          join.finish();
        },
        DataError);
    EXPECT_EQ(done, 2);
  });
}

TEST(Join, B43_ThrowSaysNothingWhenBatchesAreEqual) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    Join join({ddp}, {.uneven = Uneven::Throw});
    square_loss(net, world.rank()).backward();
    EXPECT_NO_THROW(join.finish());
  });
}

struct Normed : torch::nn::Module {
  Normed() {
    torch::manual_seed(0);
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    head = register_module("head", torch::nn::Linear(6, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear head{nullptr};
};

// Rank 0 is out of batches first, so its statistics must not become everybody's.
TEST(Join, B44_BuffersComeFromARankThatStillTrains) {
  for (const auto buffers : {Buffers::Broadcast, Buffers::Average, Buffers::None}) {
    spawn(2, [&](World& world) {
      Normed net;
      Ddp ddp(net, world.group(), {.buffers = buffers});
      Join join({ddp});
      for (int step = 0; step < (world.rank() == 0 ? 1 : 4); ++step) {
        ddp.zero_grad();
        net.forward(input(world.rank(), step)).square().mean().backward();
      }
      join.finish();
      EXPECT_EQ(net.norm->num_batches_tracked.item<int64_t>(), 4);
    });
  }
}

TEST(Join, B45_AShardedOptimizerStepsWithTheOthers) {
  for (const std::string backend : {"shm", "gloo"}) {
    spawn(3,
          [](World& world) {
            Mlp net, usual;
            Ddp ddp(net, world.group());
            ZeroOptimizer adam(net.parameters(), world.group(),
                               zero<FusedAdamW>(torch::optim::AdamWOptions(0.01)));
            Join join({ddp, adam});
            for (int step = 0; step < batches_of(world.rank()); ++step) {
              ddp.zero_grad();
              square_loss(net, world.rank(), step).backward();
              adam.step();
            }
            join.finish();
            // The longest rank alone, with everyone's gradients.
            FusedAdamW all(usual.parameters(), torch::optim::AdamWOptions(0.01));
            for (int step = 0; step < 2; ++step) {
              all.zero_grad();
              for (int rank = 0; rank < 3; ++rank) {
                if (step < batches_of(rank)) (square_loss(usual, rank, step) / 3).backward();
              }
              all.step();
            }
            for (size_t i = 0; i < net.parameters().size(); ++i) {
              EXPECT_TRUE(at::allclose(net.parameters()[i], usual.parameters()[i], 1e-5, 1e-6))
                  << i;
            }
          },
          {.backend = backend});
  }
}

TEST(Join, B45_TwoModels) {
  spawn(2, [](World& world) {
    Mlp one(1), two(2), alone_one(1), alone_two(2);
    Ddp first(one, world.group()), second(two, world.group());
    torch::optim::SGD sgd_one(one.parameters(), 0.1), sgd_two(two.parameters(), 0.1);
    Join join({first, second});
    const auto steps_of = [](int rank) { return 2 * rank + 1; };
    for (int step = 0; step < steps_of(world.rank()); ++step) {
      first.zero_grad();
      second.zero_grad();
      square_loss(one, world.rank(), step).backward();
      square_loss(two, world.rank(), step).backward();
      sgd_one.step();
      sgd_two.step();
    }
    join.finish();
    for (Mlp* net : {&alone_one, &alone_two}) {
      torch::optim::SGD sgd(net->parameters(), 0.1);
      for (int step = 0; step < steps_of(1); ++step) {
        sgd.zero_grad();
        for (int rank = 0; rank < 2; ++rank) {
          if (step < steps_of(rank)) (square_loss(*net, rank, step) / 2).backward();
        }
        sgd.step();
      }
      // Rank 0 made one step of its own.
      const Mlp& joined = net == &alone_one ? one : two;
      for (size_t i = 0; world.rank() == 1 && i < net->parameters().size(); ++i) {
        EXPECT_TRUE(at::allclose(joined.parameters()[i], net->parameters()[i], 1e-5, 1e-6)) << i;
      }
    }
    EXPECT_EQ(first.log().pass_count, second.log().pass_count + 1);  // the one that found nobody
    EXPECT_EQ(second.log().pass_count, 3);
  });
}

// A step of rank r's: micro-batches 2 step and 2 step + 1, of which the last rank lacks the second
// when it runs out.
TEST(Join, MicroBatchesUnderHoldCountWhenARankRunsOut) {
  for (const auto divisor : {Divisor::World, Divisor::Active}) {
    spawn(3, [&](World& world) {
      const auto micro_batches = [](int rank) { return rank == 2 ? 3 : rank == 1 ? 4 : 6; };
      Mlp net;
      Ddp ddp(net, world.group(), {.bucket_bytes = {100}});
      torch::optim::SGD sgd(net.parameters(), 0.1);
      Join join({ddp}, {.divisor = divisor});
      for (int i = 0; i < micro_batches(world.rank()); ++i) {
        if (i % 2 == 0) {
          ddp.zero_grad();
          const auto hold = ddp.hold();
          square_loss(net, world.rank(), i).backward();
        } else {
          square_loss(net, world.rank(), i).backward();
          sgd.step();
        }
      }
      join.finish();
      Mlp whole;
      torch::optim::SGD reference(whole.parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        reference.zero_grad();
        int active = 0;
        for (int rank = 0; rank < 3; ++rank) active += 2 * step < micro_batches(rank) ? 1 : 0;
        for (int i = 2 * step; i < 2 * step + 2; ++i) {
          for (int rank = 0; rank < 3; ++rank) {
            const double share = 1.0 / (divisor == Divisor::World ? 3 : active);
            if (i < micro_batches(rank)) (square_loss(whole, rank, i) * share).backward();
          }
        }
        reference.step();
      }
      for (size_t i = 0; i < whole.parameters().size(); ++i) {
        EXPECT_TRUE(at::allclose(net.parameters()[i], whole.parameters()[i], 1e-5, 1e-6)) << i;
      }
    });
  }
}

// The second adds to what the first left in the gradients: the average of the first is part of
// what an absent rank has to contribute.
TEST(Join, TwoBackwardsAStep) {
  for (const bool set_to_none : {true, false}) {
    for (const auto divisor : {Divisor::World, Divisor::Active}) {
      spawn(3, [&](World& world) {
        Mlp net;
        Ddp ddp(net, world.group(), {.bucket_bytes = {100}});
        torch::optim::SGD sgd(net.parameters(), 0.1);
        Join join({ddp}, {.divisor = divisor});
        for (int step = 0; step < batches_of(world.rank()); ++step) {
          sgd.zero_grad(set_to_none);
          square_loss(net, world.rank(), step).backward();
          (2 * square_loss(net, world.rank(), step + 7)).backward();
          // The head is reached by the first backward() only.
          net.first(input(world.rank(), step)).square().mean().backward();
          sgd.step();
        }
        join.finish();
        Mlp whole;
        torch::optim::SGD reference(whole.parameters(), 0.1);
        for (int step = 0; step < 2; ++step) {
          reference.zero_grad();
          int active = 0;
          for (int rank = 0; rank < 3; ++rank) active += step < batches_of(rank) ? 1 : 0;
          for (int rank = 0; rank < 3; ++rank) {
            if (step >= batches_of(rank)) continue;
            const double share = 1.0 / (divisor == Divisor::World ? 3 : active);
            const auto loss = square_loss(whole, rank, step) +
                              2 * square_loss(whole, rank, step + 7) +
                              whole.first(input(rank, step)).square().mean();
            (loss * share).backward();
          }
          reference.step();
        }
        for (size_t i = 0; i < whole.parameters().size(); ++i) {
          EXPECT_TRUE(at::allclose(net.parameters()[i], whole.parameters()[i], 1e-5, 1e-6)) << i;
        }
      });
    }
  }
}

TEST(Join, HeldMicroBatchesOfAllRanksAreAveragedButAreNoStep) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    Join join({ddp});
    {
      const auto hold = ddp.hold();
      square_loss(net, world.rank()).backward();
    }
    join.finish();
    expect_equal(gradients(net), average_gradients(2, make_mlp, square_loss_of_mlp));
  });
}

TEST(Join, HeldMicroBatchesOfASecondModelAreAveragedToo) {
  spawn(2, [](World& world) {
    Mlp net, other(1);
    Ddp first(net, world.group()), second(other, world.group());
    Join join({first, second});
    {
      const auto hold = first.hold(), hold_second = second.hold();
      (square_loss(net, world.rank()) + square_loss(other, world.rank())).backward();
    }
    join.finish();
    expect_equal(gradients(net), average_gradients(2, make_mlp, square_loss_of_mlp));
    expect_equal(gradients(other),
                 average_gradients(
                     2, [] { return std::make_shared<Mlp>(1); }, square_loss_of_mlp));
  });
}

struct SyncNormed : torch::nn::Module {
  explicit SyncNormed(const Group& group) {
    norm = register_module("norm", SyncBatchNorm1d(torch::nn::BatchNormOptions(6), group));
    head = register_module("head", torch::nn::Linear(6, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(x)); }
  SyncBatchNorm1d norm{nullptr};
  torch::nn::Linear head{nullptr};
};

// Its layers wait for all ranks in forward(), where a rank without a batch is not to be found.
TEST(Join, B43_SyncBatchNormToldThatARankHasRunOut) {
  for (const auto uneven : {Uneven::Throw, Uneven::Continue}) {
    spawn(3, [&](World& world) {
      SyncNormed net(world.group().split(0));
      Ddp ddp(net, world);
      Join join({ddp}, {.uneven = uneven});
      int done = 0;
      EXPECT_THAT(message_of<DataError>([&] {
                    for (; done < (world.rank() == 1 ? 2 : 4); ++done) {
                      ddp.zero_grad();
                      net.forward(input(world.rank(), done)).square().mean().backward();
                    }
                    join.finish();
                  }),
                  ::testing::HasSubstr("2 of 3 ranks have a batch for this step"));
      EXPECT_EQ(done, 2);
    });
  }
}

TEST(Join, HeldMicroBatchesThroughSyncBatchNormAreAveragedToo) {
  spawn(2, [](World& world) {
    SyncNormed net(world.group().split(0));
    Ddp ddp(net, world);
    Join join({ddp});
    {
      const auto hold = ddp.hold();
      net.forward(input(world.rank())).square().mean().backward();
    }
    const at::Tensor sum = net.head->weight.grad().clone();
    world.group().all_reduce(sum, ReduceOp::Sum).wait();
    join.finish();
    expect_equal({net.head->weight.grad()}, {sum / 2});
  });
}

// Ranks 0 and 1 would have left when they have no batch, and ranks 2 and 3 waited for them.
TEST(Join, AFirstDdpWhoseGroupLacksRanksOfAnotherIsRefused) {
  spawn(4, [](World& world) {
    Mlp one, two, three;
    const Group half = world.group().split(world.rank() / 2);
    Ddp of_half(one, half), of_all(two, world), alone(three, Group());
    for (Ddp* first : {&of_half, &alone}) {
      EXPECT_THAT(message_of<ConfigError>([&] {
                    Join({*first, of_all});
                  }),
                  ::testing::HasSubstr("name first a Ddp whose group has all"));
    }
    Join join({of_all, of_half, alone});
    for (int step = 0; step < world.rank() / 2; ++step) {
      for (Mlp* net : {&two, &one, &three}) square_loss(*net, world.rank(), step).backward();
    }
    join.finish();
  });
}

// The longest advice of all: none of it is cut.
TEST(Join, AnotherOrderThanThatOfTheListIsToldWithTheWholeAdvice) {
  spawn(2, [](World& world) {
    Mlp one, two;
    Ddp first(one, world), second(two, world);
    Join join({first, second});
    EXPECT_THAT(
        message_of<CommError>([&] {
          square_loss(world.rank() == 0 ? one : two, world.rank()).backward();
          square_loss(world.rank() == 0 ? two : one, world.rank()).backward();
        }),
        ::testing::HasSubstr(
            "(or a rank ran another number of backward(), or in another order than the Join's "
            "list: within a Join each Ddp has one in a step)"));
  });
}

TEST(Join, SyncBatchNormWithEqualNumbersOfBatches) {
  spawn(2, [](World& world) {
    SyncNormed net(world.group().split(0));
    Ddp ddp(net, world);
    {
      Join join({ddp}, {.uneven = Uneven::Throw});
      for (int step = 0; step < 2; ++step) {
        {
          const auto hold = ddp.hold();
          net.forward(input(world.rank(), step)).square().mean().backward();
        }
        net.forward(input(world.rank(), step)).square().mean().backward();
      }
      join.finish();
    }
    net.forward(input(world.rank())).square().mean().backward();
    EXPECT_EQ(ddp.log().pass_count, 3);
  });
}

TEST(Join, AHookThatIsSilentCannotJoin) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(),
            {.hook = std::make_shared<LocalSgd>(LocalSgdOptions{.start_iteration = 0})});
    Join join({ddp});
    EXPECT_THROW(square_loss(net, world.rank()).backward(), ConfigError);
    EXPECT_THROW(Join({}), ConfigError);
  });
}

}  // namespace
}  // namespace lockstep::test

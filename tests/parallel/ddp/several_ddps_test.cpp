// Several Ddps that one backward() reaches, in an order that depends on the rank.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/lockstep.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

// Layers may be left out.
struct StoreysImpl : torch::nn::Module {
  explicit StoreysImpl(uint64_t seed) {
    torch::manual_seed(seed);
    first = register_module("first", torch::nn::Linear(6, 6));
    second = register_module("second", torch::nn::Linear(6, 6));
    third = register_module("third", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 6));
    this->to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x, bool with_second = true, bool with_third = true) {
    x = first(x).tanh();
    if (with_second) x = second(x).tanh();
    if (with_third) x = third(x).tanh();
    return last(x);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, last{nullptr};
};
TORCH_MODULE(Storeys);

at::Tensor tower_rows(int64_t rank, int64_t step) {
  return at::randn({4, 6}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank)),
                   at::kDouble);
}

// A rank's loss of a step, from two models.
using LossOfTowers = std::function<at::Tensor(Storeys&, Storeys&, int rank, int step)>;

void expect_tower(Storeys& net, Storeys& usual) {
  const auto parameters = usual->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const at::Tensor &gradient = item.value().grad(), other = parameters[item.key()].grad();
    ASSERT_EQ(gradient.defined(), other.defined()) << item.key();
    if (gradient.defined()) {
      EXPECT_TRUE(at::allclose(gradient, other)) << item.key();
    }
  }
}

// Every rank also computes the losses of all ranks without Ddp.
void expect_towers(int ranks, const LossOfTowers& loss, DdpOptions options = {}) {
  spawn(ranks, [&](World& world) {
    Storeys one(1), two(2), usual_one(1), usual_two(2);
    Ddp first(one, world, options), second(two, world, options);
    for (int step = 0; step < 5; ++step) {
      first.zero_grad();
      second.zero_grad();
      usual_one->zero_grad();
      usual_two->zero_grad();
      loss(one, two, world.rank(), step).backward();
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (int rank = 0; rank < world.size(); ++rank)
        sum = sum + loss(usual_one, usual_two, rank, step);
      (sum / world.size()).backward();
      expect_tower(one, usual_one);
      expect_tower(two, usual_two);
    }
  });
}

void expect_towers(const LossOfTowers& loss) {
  for (const int ranks : {2, 3}) {
    expect_towers(ranks, loss);
    expect_towers(ranks, loss, {.bucket_bytes = {64}});
  }
}

// As a generator's step in a GAN.
TEST(SeveralDdps, AGeneratorBelowADiscriminatorThatLeavesOutALayer) {
  expect_towers([](Storeys& generator, Storeys& discriminator, int rank, int step) {
    const at::Tensor made = generator->forward(tower_rows(rank, step));
    return discriminator->forward(made, rank != 1 || step == 0).square().mean();
  });
}

TEST(SeveralDdps, ADiscriminatorsStepsBetweenThoseOfBoth) {
  for (const int64_t bytes : {int64_t{64}, int64_t{1} << 20}) {
    spawn(2, [&](World& world) {
      Storeys generator(1), discriminator(2), usual_generator(1), usual_discriminator(2);
      Ddp first(generator, world, {.bucket_bytes = {bytes}});
      Ddp second(discriminator, world, {.bucket_bytes = {bytes}});
      for (int step = 0; step < 6; ++step) {
        const bool both = step % 2 == 1;
        const auto loss = [&](Storeys& g, Storeys& d, int rank) {
          const at::Tensor made = g->forward(tower_rows(rank, step), step != 3 || rank == 0);
          return d->forward(both ? made : made.detach(), rank == 0 || step == 0).square().mean();
        };
        for (Storeys* each : {&generator, &discriminator, &usual_generator, &usual_discriminator})
          (*each)->zero_grad();
        loss(generator, discriminator, world.rank()).backward();
        ((loss(usual_generator, usual_discriminator, 0) +
          loss(usual_generator, usual_discriminator, 1)) /
         2)
            .backward();
        expect_tower(generator, usual_generator);
        expect_tower(discriminator, usual_discriminator);
      }
    });
  }
}

TEST(SeveralDdps, EachLeavesOutOtherLayersOnEachRank) {
  expect_towers([](Storeys& one, Storeys& two, int rank, int step) {
    const bool even = rank == step % 2;
    return one->forward(tower_rows(rank, step), even, !even).square().mean() +
           two->forward(tower_rows(rank, step), true, even).abs().mean();
  });
}

// Their passes begin in another order on each rank, from the first step on.
TEST(SeveralDdps, RanksRunThemInOppositeOrder) {
  expect_towers([](Storeys& one, Storeys& two, int rank, int step) {
    const at::Tensor x = tower_rows(rank, step);
    if (rank == 1) {
      return two->forward(one->first(x).tanh()).square().mean() + one->forward(x).square().mean();
    }
    return one->forward(two->forward(x)).square().mean();
  });
}

// A program that trains each of its models in a thread of its own.
TEST(SeveralDdps, EachInAThreadWithAGroupOfItsOwn) {
  for (const int ranks : {2, 3}) {
    spawn(ranks, [](World& world) {
      Storeys one(1), two(2), usual_one(1), usual_two(2);
      Ddp first(one, world.group().split(0)), second(two, world.group().split(0));
      const auto train = [&world](Storeys& net, Storeys& usual, int steps) {
        for (int step = 0; step < steps; ++step) {
          for (Storeys* each : {&net, &usual}) (*each)->zero_grad();
          net->forward(tower_rows(world.rank(), step)).square().mean().backward();
          at::Tensor sum = at::zeros({}, at::kDouble);
          for (int rank = 0; rank < world.size(); ++rank)
            sum = sum + usual->forward(tower_rows(rank, step)).square().mean();
          (sum / world.size()).backward();
          expect_tower(net, usual);
        }
      };
      std::thread of_one([&] { train(one, usual_one, 20); });
      std::thread of_two([&] { train(two, usual_two, 30); });
      of_one.join();
      of_two.join();
    });
  }
}

TEST(SeveralDdps, WithHold) {
  spawn(2, [](World& world) {
    Storeys one(1), two(2), usual_one(1), usual_two(2);
    Ddp first(one, world, {.bucket_bytes = {64}}), second(two, world, {.bucket_bytes = {64}});
    for (int step = 0; step < 3; ++step) {
      for (Storeys* each : {&one, &two, &usual_one, &usual_two}) (*each)->zero_grad();
      const auto loss = [&](Storeys& a, Storeys& b, int rank, int part) {
        const at::Tensor x = tower_rows(rank, 10 * step + part);
        return b->forward(a->forward(x, rank == 0), rank == 1).square().mean();
      };
      {
        const auto hold = first.hold(), other = second.hold();
        loss(one, two, world.rank(), 0).backward();
      }
      loss(one, two, world.rank(), 1).backward();
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const int rank : {0, 1}) {
        sum = sum + loss(usual_one, usual_two, rank, 0) + loss(usual_one, usual_two, rank, 1);
      }
      (sum / 2).backward();
      expect_tower(one, usual_one);
      expect_tower(two, usual_two);
    }
  });
}

std::pair<uint64_t, uint64_t> trained_in_lanes(const Group& group) {
  Storeys one(1), two(2);
  Ddp first(one, group, {.bucket_bytes = {64}, .lanes = 6});
  Ddp second(two, group, {.bucket_bytes = {64}, .lanes = 6});
  torch::optim::SGD sgd(one->parameters(), 0.1), other(two->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    first.zero_grad();
    second.zero_grad();
    for (const Lane lane : first.lanes(StepKey{.seed = 1, .step = step}, second)) {
      const at::Tensor x = tower_rows(lane.index, step);
      const bool some = (lane.index + step) % 3 != 0;
      (one->forward(x, some).square().mean() + two->forward(x, true, !some).abs().mean())
          .backward();
    }
    sgd.step();
    other.step();
  }
  return {first.fingerprint(), second.fingerprint()};
}

// Lanes reach other layers, and on any number of ranks the bits are those of one.
TEST(SeveralDdps, OfLanesThatLeaveOutOtherLayers) {
  for (const int ranks : {2, 3}) {
    spawn(ranks, [](World& world) {
      EXPECT_EQ(trained_in_lanes(world.group()), trained_in_lanes(Group()));
    });
  }
}

bool starts_early(const Ddp& ddp) {
  const auto pass = ddp.log().passes.back();
  return pass.buckets.front().started < pass.last_gradient;
}

// Buckets of the one that backward() reaches first do not wait for its end.
TEST(SeveralDdps, BucketsThatComeFirstDoNotWait) {
  spawn(2, [](World& world) {
    Storeys generator(1), discriminator(2);
    Ddp first(generator, world, {.bucket_bytes = {64}});
    Ddp second(discriminator, world, {.bucket_bytes = {64}});
    for (int step = 0; step < 6; ++step) {
      const bool both = step % 2 == 1;
      first.zero_grad();
      second.zero_grad();
      const at::Tensor made = generator->forward(tower_rows(world.rank(), step));
      discriminator->forward(both ? made : made.detach()).square().mean().backward();
      if (step >= 2) {
        EXPECT_TRUE(starts_early(second)) << step;
      }
      if (step >= 3 && both) {
        EXPECT_TRUE(starts_early(first)) << step;
      }
    }
  });
}

// A rank without a batch follows those that have one, also from one group to another.
TEST(SeveralDdps, WithinAJoin) {
  for (const auto& [bytes, groups] :
       std::vector<std::pair<int64_t, int>>{{64, 1}, {1 << 20, 1}, {64, 2}, {1 << 20, 2}}) {
    spawn(2, [&, bytes = bytes, groups = groups](World& world) {
      Storeys one(1), two(2), usual_one(1), usual_two(2);
      const Group other = groups == 1 ? world.group() : world.group().split(0);
      Ddp first(one, world, {.bucket_bytes = {bytes}}),
          second(two, other, {.bucket_bytes = {bytes}});
      Join join({first, second});
      const auto loss = [](Storeys& a, Storeys& b, int rank, int step) {
        return b->forward(a->forward(tower_rows(rank, step), rank == 0), step != 1).square().mean();
      };
      const int steps = 2 + 3 * world.rank();
      for (int step = 0; step < steps; ++step) {
        for (Storeys* each : {&one, &two, &usual_one, &usual_two}) (*each)->zero_grad();
        loss(one, two, world.rank(), step).backward();
        at::Tensor sum = loss(usual_one, usual_two, 1, step);
        if (step < 2) sum = sum + loss(usual_one, usual_two, 0, step);
        (sum / 2).backward();
        expect_tower(one, usual_one);
        expect_tower(two, usual_two);
      }
      join.finish();
    });
  }
}

// A hook that communicates as it starts waits for all ranks, where one without a batch is in the
// Ddp before; and refresh() does not make the first Ddp the last.
TEST(SeveralDdps, WithinAJoinKeepItsOrder) {
  for (const bool refreshes : {false, true}) {
    spawn(2, [&](World& world) {
      Storeys one(1), two(2);
      const Group other = world.group().split(0);
      const auto hook = [] { return std::make_shared<CastHook>(at::kFloat); };
      Ddp first(one, world, {.bucket_bytes = {64}, .hook = hook()}),
          second(two, other, {.bucket_bytes = {64}, .hook = hook()});
      Join join({first, second});
      if (refreshes) first.refresh();
      for (int step = 0; step < 2 + 3 * world.rank(); ++step) {
        one->zero_grad();
        two->zero_grad();
        two->forward(one->forward(tower_rows(world.rank(), step), true), true)
            .square()
            .mean()
            .backward();
      }
      join.finish();
    });
  }
}

// Each rank begins with another group's pass.
// A joinable of the program's own, which goes through two Ddps.
struct Both : parallel::Joinable {
  Both(Ddp& first, Ddp& second) : ddps{&first, &second} {}
  void join(const JoinOptions& options) override {
    for (Ddp* ddp : ddps) ddp->join(options);
  }
  void leave() override {
    for (Ddp* ddp : ddps) ddp->leave();
  }
  bool shadow() override {
    const bool any = ddps[0]->shadow();
    if (any) ddps[1]->shadow();
    return any;
  }
  std::vector<Ddp*> ddps;
};

TEST(SeveralDdps, WithinAJoinableOfTheProgramKeepItsOrder) {
  spawn(2, [&](World& world) {
    Storeys one(1), two(2);
    Ddp first(one, world, {.bucket_bytes = {64}}), second(two, world, {.bucket_bytes = {64}});
    Both both(first, second);
    Join join({both});
    for (int step = 0; step < 2 + 3 * world.rank(); ++step) {
      one->zero_grad();
      two->zero_grad();
      two->forward(one->forward(tower_rows(world.rank(), step))).square().mean().backward();
    }
    join.finish();
  });
}

// What is held of a step that no rank ends, as Join's own Ddps average it.
TEST(SeveralDdps, WithinAJoinableOfTheProgramAverageWhatIsHeldAtTheEnd) {
  spawn(2, [&](World& world) {
    Storeys one(1), two(2), usual_one(1), usual_two(2);
    Ddp first(one, world, {.bucket_bytes = {64}}), second(two, world, {.bucket_bytes = {64}});
    Both both(first, second);
    Join join({both});
    {
      const auto hold = first.hold(), other = second.hold();
      two->forward(one->forward(tower_rows(world.rank(), 0))).square().mean().backward();
    }
    join.finish();
    for (const int rank : {0, 1}) {
      (usual_two->forward(usual_one->forward(tower_rows(rank, 0))).square().mean() / 2).backward();
    }
    expect_tower(one, usual_one);
    expect_tower(two, usual_two);
  });
}

TEST(SeveralDdps, OnTwoGroupsInAnyOrder) {
  for (const int64_t bytes : {int64_t{64}, int64_t{1} << 20}) {
    spawn(3, [&](World& world) {
      Storeys one(1), two(2), three(3), usual_one(1), usual_two(2), usual_three(3);
      const Group other = world.group().split(0);
      Ddp first(one, world, {.bucket_bytes = {bytes}}),
          second(two, other, {.bucket_bytes = {bytes}}),
          third(three, world, {.bucket_bytes = {bytes}});
      for (int step = 0; step < 4; ++step) {
        const auto loss = [&](Storeys& net, int rank) {
          return net->forward(tower_rows(rank, step), rank != 1, rank != step).square().mean();
        };
        for (Storeys* each : {&one, &two, &three, &usual_one, &usual_two, &usual_three})
          (*each)->zero_grad();
        std::vector<Storeys*> nets{&one, &two, &three};
        std::ranges::rotate(nets, nets.begin() + (world.rank() + step) % 3);
        at::Tensor sum = at::zeros({}, at::kDouble);
        for (Storeys* each : nets) sum = sum + loss(*each, world.rank());
        sum.backward();
        for (const auto& [net, usual] : {std::pair(&one, &usual_one), std::pair(&two, &usual_two),
                                         std::pair(&three, &usual_three)}) {
          ((loss(*usual, 0) + loss(*usual, 1) + loss(*usual, 2)) / 3).backward();
          expect_tower(*net, *usual);
        }
      }
    });
  }
}

// In the second of four steps `second` refuses the pass: its model leaves out a parameter.
void expect_steps_around_one_that_throws(Storeys& one, Storeys& two, Ddp& first, Ddp& second,
                                         int rank) {
  for (int step = 0; step < 4; ++step) {
    first.zero_grad();
    second.zero_grad();
    const at::Tensor x = tower_rows(rank, step);
    const at::Tensor loss = two->forward(one->forward(x), step != 1).square().mean();
    if (step == 1) {
      EXPECT_THROW(loss.backward(), ConfigError);
    } else {
      loss.backward();
      EXPECT_TRUE(one->first->weight.grad().defined());
    }
  }
}

// What one group refuses leaves no pass of another group behind.
TEST(SeveralDdps, OnTwoGroupsAfterABackwardThatThrew) {
  spawn(2, [](World& world) {
    Storeys one(1), two(2);
    Ddp first(one, world, {.bucket_bytes = {64}});
    Ddp second(two, world.group().split(0), {.bucket_bytes = {64}, .unused = Unused::Error});
    expect_steps_around_one_that_throws(one, two, first, second, world.rank());
  });
}

// A pass that threw leaves nothing behind for the next.
TEST(SeveralDdps, AfterABackwardThatThrew) {
  spawn(2, [](World& world) {
    Storeys one(1), two(2);
    Ddp first(one, world, {.bucket_bytes = {64}}), second(two, world, {.unused = Unused::Error});
    expect_steps_around_one_that_throws(one, two, first, second, world.rank());
  });
}

}  // namespace
}  // namespace lockstep::test

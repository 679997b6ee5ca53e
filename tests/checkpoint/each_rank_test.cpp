// What ranks do not have alike: told, or saved for each of them.
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <sstream>

#include "checkpoint/generators.h"
#include "checkpoint/model.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/data/torch_sampler.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/random.h"
#include "lockstep/parallel/stateful.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Small tensors are compared element by element, large ones at some.
TEST(EachRank, RanksThatHaveTrainedApartAreToldSo) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net;
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    const auto changed = [&](at::Tensor tensor, int64_t element) {
      const at::NoGradGuard no_grad;
      if (world.rank() == 1) tensor.view(-1)[element] += 1;
      return message_of<CheckpointError>([&] { checkpoints.save(1); });
    };
    EXPECT_THAT(changed(net.half, 5),
                AllOf(HasSubstr("rank 0 has tensor net/half: BF16 [7] with the bits "),
                      HasSubstr("rank 1 has tensor net/half: BF16 [7] with the bits "),
                      HasSubstr("CheckpointerOptions::each_rank")));
    net.half.zero_();
    checkpoints.save(1);
    const at::NoGradGuard no_grad;
    net.large.mul_(1.0 + world.rank());
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.save(2); }),
                HasSubstr("tensor net/large"));
    EXPECT_EQ(checkpoints.restore_latest()->step, 1);
  });
}

// A replay buffer and how full it is.
TEST(EachRank, AreNamedAsTheyAreTracked) {
  const Folder folder;
  spawn(2, [&](World& world) {
    at::Tensor replay = torch::full({4}, world.rank(), torch::kFloat);
    at::Tensor filled = torch::full({}, 10 + world.rank(), torch::kLong);
    const auto with = [&](std::vector<std::string> patterns, const auto& call) {
      Checkpointer checkpoints(world, folder.path(), {.each_rank = std::move(patterns)});
      checkpoints.track("replay", replay);
      checkpoints.track("filled", filled);
      call(checkpoints);
    };
    const auto save = [](Checkpointer& checkpoints) { checkpoints.save(1); };
    testing::internal::CaptureStderr();
    EXPECT_THAT(message_of<CheckpointError>([&] {
                  with({"reply", "filled"}, save);
                }),
                HasSubstr("rank 0 has tensor replay/tensor"));
    const std::string said = testing::internal::GetCapturedStderr();
    if (world.is_main()) {
      EXPECT_THAT(said, HasSubstr("each_rank has \"reply\", which is not a tensor of what is "
                                  "tracked: replay, filled"));
    }
    EXPECT_THAT(said, testing::Not(HasSubstr("\"filled\"")));
    with({"replay", "filled"}, save);
    replay.zero_();
    filled.zero_();
    with({"replay", "filled"}, [](Checkpointer& checkpoints) { checkpoints.restore_latest(); });
    EXPECT_EQ(replay.sum().item<double>(), 4 * world.rank());
    EXPECT_EQ(filled.item<int64_t>(), 10 + world.rank());
    int64_t count = 10 + world.rank();
    Checkpointer numbers(world, folder / "numbers", {.each_rank = {"count"}});
    numbers.track("count", count);
    EXPECT_THAT(message_of<CheckpointError>([&] { numbers.save(1); }),
                HasSubstr("or keep what each rank has of its own in a tensor that "
                          "CheckpointerOptions::each_rank names"));
  });
}

TEST(EachRank, WhatARankHasOfItsOwnGoesBackToIt) {
  const Folder folder;
  const auto with = [&](World& world, const auto& body) {
    Everything net;
    torch::optim::Adam adam(net.trained(), torch::optim::AdamOptions(0.01));
    Checkpointer checkpoints(world, folder.path(),
                             {.each_rank = {"net/ti*", "net/large", "adam/*"}});
    checkpoints.track("net", net);
    checkpoints.track("adam", adam);
    body(net, adam, checkpoints);
  };
  const auto moment = [](Everything& net, torch::optim::Adam& adam) {
    auto& state = *adam.state().at(net.large.unsafeGetTensorImpl());
    return dynamic_cast<torch::optim::AdamParamState&>(state).exp_avg();
  };
  // As LocalSgd: gradients, moments and some parameters of each rank's own.
  const auto apart = [](Everything& net, int rank) {
    const at::NoGradGuard no_grad;
    net.first->weight.mul_(1.0 + rank);
    net.large.mul_(1.0 + rank);
  };
  spawn(2, [&](World& world) {
    with(world, [&](Everything& net, torch::optim::Adam& adam, Checkpointer& checkpoints) {
      apart(net, world.rank());
      for (auto& one : net.trained()) one.mutable_grad() = at::zeros_like(one);
      net.large.mutable_grad().fill_(1.0 + world.rank());
      adam.step();
      checkpoints.save(1);
      const auto weight = net.first->weight.clone(), large = net.large.clone();
      const auto mean = moment(net, adam).clone();
      net.scramble();
      moment(net, adam).zero_();
      checkpoints.restore_latest();
      EXPECT_TRUE(at::equal(net.first->weight, weight));
      EXPECT_TRUE(at::equal(net.large, large));
      EXPECT_TRUE(at::equal(moment(net, adam), mean));
    });
  });
  EXPECT_THAT(checkpoint::verify(folder / "step-00000001"), testing::ElementsAre());
  spawn(3, [&](World& world) {
    with(world, [&](Everything& net, torch::optim::Adam& adam, Checkpointer& checkpoints) {
      Everything saved;
      net.scramble();
      checkpoints.restore_latest();
      const int source = world.rank() % 2;
      EXPECT_FLOAT_EQ(moment(net, adam).view(-1)[0].item<float>(), 0.1F * (1.0F + source));
      EXPECT_TRUE(at::allclose(net.large, saved.large * (1.0 + source), 0.1, 0.1));
      EXPECT_TRUE(at::equal(net.second->weight, saved.second->weight));
    });
  });
}

// Saved when all were alike: each takes it as its own from now on.
TEST(EachRank, TakesWhatAllHadAlike) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net, expected;
    Checkpointer alike(world, folder.path());
    alike.track("net", net);
    alike.save(1);
    net.scramble();
    Checkpointer own(world, folder.path(), {.each_rank = {"*"}});
    own.track("net", net);
    own.restore_latest();
    EXPECT_TRUE(same(net, expected));
  });
}

TEST(Generators, OfOnesOwnAndWithoutADdpThatSeedsThemAgain) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(world.rank());
    const auto numbers = [&] { return at::cat({torch::rand({3}), at::rand({3}, generator)}); };
    const auto build = [&](bool restores_first, const auto& body) {
      seed_everything(4, world);
      torch::nn::Linear net(2, 2);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("net", net);
      checkpoints.track("noise", generator);
      checkpoints.track_generators();
      if (restores_first) checkpoints.restore_latest();
      Ddp ddp(net, world);
      body(checkpoints);
    };
    at::Tensor expected;
    build(false, [&](Checkpointer& checkpoints) {
      numbers();
      checkpoints.save(1);
      expected = numbers();
    });
    build(true, [&](Checkpointer&) { EXPECT_TRUE(at::equal(numbers(), expected)); });
    build(false, [&](Checkpointer& checkpoints) {
      checkpoints.restore_latest();
      EXPECT_TRUE(at::equal(numbers(), expected));
    });
  });
}

// As between machines with a GPU and without.
TEST(Generators, ThatAreOnOneSideOnlyStayAsTheyAre) {
  const Folder folder;
  spawn(2, [&](World& world) {
    auto cpu = at::make_generator<at::CPUGeneratorImpl>(world.rank());
    auto cuda = at::make_generator<at::CPUGeneratorImpl>(10 + world.rank());
    const auto with = [&](const std::string& name, const checkpoint::NamedGenerators& all,
                          const auto& body) {
      Checkpointer checkpoints(world, folder / name);
      checkpoints.track("generators", checkpoint::generators(all, world.group()));
      body(checkpoints);
    };
    for (const bool has_gpu : {true, false}) {
      const checkpoint::NamedGenerators one{{"cpu", cpu}}, both{{"cpu", cpu}, {"cuda", cuda}};
      const std::string name = has_gpu ? "gpu" : "none";
      with(name, has_gpu ? both : one, [](Checkpointer& checkpoints) { checkpoints.save(1); });
      const at::Tensor expected = at::rand({3}, cpu), stays = cuda.get_state();
      with(name, has_gpu ? one : both, [&](Checkpointer& checkpoints) {
        testing::internal::CaptureStderr();
        checkpoints.restore_latest();
        const std::string said = testing::internal::GetCapturedStderr();
        EXPECT_EQ(said.find("'cuda'") != std::string::npos, world.rank() == 0) << said;
      });
      EXPECT_TRUE(at::equal(at::rand({3}, cpu), expected));
      EXPECT_TRUE(at::equal(cuda.get_state(), stays));
    }
  });
}

TEST(Stateful, ATorchSamplerGoesOnBehindTheBatchesThatTheLoopHasTaken) {
  const Folder folder;
  const auto with = [&](World& world, const auto& body) {
    TorchSampler sampler(24, world, {.seed = 2});
    int64_t taken = 0;
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("sampler", stateful(sampler, taken));
    body(sampler, taken, checkpoints);
  };
  const auto gathered = [](World& world, const std::vector<size_t>& mine) {
    std::multiset<size_t> all;
    for (const auto& text :
         world.group().all_gather_bytes(fmt::format("{}", fmt::join(mine, " ")))) {
      std::istringstream in(text);
      for (size_t i = 0; in >> i;) all.insert(i);
    }
    return all;
  };
  spawn(2, [&](World& world) {
    with(world, [&](TorchSampler& sampler, int64_t& taken, Checkpointer& checkpoints) {
      sampler.set_epoch(3);
      sampler.reset();
      const auto first = *sampler.next(3), second = *sampler.next(3);
      sampler.next(3);  // asked for ahead of the loop
      taken = 2;
      checkpoints.save(1);
      std::vector<size_t> seen = first;
      seen.insert(seen.end(), second.begin(), second.end());
      const auto all = gathered(world, seen);
      if (world.rank() == 0) write(folder / "seen", fmt::format("{}", fmt::join(all, " ")));
    });
  });
  spawn(3, [&](World& world) {
    with(world, [&](TorchSampler& sampler, int64_t& taken, Checkpointer& checkpoints) {
      taken = 7;
      checkpoints.restore_latest();
      EXPECT_EQ(taken, 0);
      EXPECT_EQ(sampler.epoch(), 3);
      sampler.reset();
      std::vector<size_t> rest;
      while (const auto batch = sampler.next(2))
        rest.insert(rest.end(), batch->begin(), batch->end());
      auto all = gathered(world, rest);
      std::istringstream in(contents(folder / "seen"));
      for (size_t i = 0; in >> i;) all.insert(i);
      EXPECT_EQ(all.size(), 24U);
      EXPECT_EQ(std::set<size_t>(all.begin(), all.end()).size(), 24U);
    });
  });
}

TEST(Stateful, ATorchSamplersCountIsResetBeforeEachPass) {
  // What a loop sees, that is stopped between two epochs and started again.
  const auto epochs_of = [](World& world, const Folder& folder, bool is_reset) {
    std::vector<int64_t> seen;
    for ([[maybe_unused]] const int job : {0, 1}) {
      TorchSampler sampler(24, world, {.seed = 2});
      int64_t taken = 0, step = 0;
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("sampler", stateful(sampler, taken));
      checkpoints.track("step", step);
      checkpoints.restore_latest();
      for (int64_t epoch = sampler.epoch(); epoch < 3; ++epoch) {
        if (is_reset) taken = 0;
        sampler.reset();
        while (sampler.next(4)) {
          ++taken, ++step;
          seen.push_back(epoch);
        }
        checkpoints.save(step);
        if (epoch == 1 && job == 0) break;
      }
    }
    return seen;
  };
  const Folder folder, other;
  spawn(2, [&](World& world) {
    EXPECT_THAT(epochs_of(world, folder, true), testing::ElementsAre(0, 0, 0, 1, 1, 1, 2, 2, 2));
    EXPECT_THAT(message_of<CheckpointError>([&] { epochs_of(world, other, false); }),
                HasSubstr("6 batches taken of epoch 1, of which the data loader has asked "
                          "for 3: count the batches of this pass alone"));
  });
}

}  // namespace
}  // namespace lockstep::test

#include "lockstep/checkpoint/checkpointer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "checkpoint/model.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/parallel/ddp.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Damaged;
using checkpoint::verify;
using testing::AllOf;
using testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;

struct Case {
  const char* name;
  int saved, restored;
  bool async;
};

class Worlds : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    , Worlds,
    testing::Values(Case{"From1To1", 1, 1, false}, Case{"From1To3", 1, 3, false},
                    Case{"From2To2Behind", 2, 2, true}, Case{"From4To2", 4, 2, false},
                    Case{"From3To1Behind", 3, 1, true}, Case{"From2To5", 2, 5, false}),
    [](const auto& test) { return test.param.name; });

// Every number of ranks restores the bits that every other saved, and goes on as if nothing had
// been.
TEST_P(Worlds, RestoreWhatOthersSaved) {
  const auto [name, saved, restored, async] = GetParam();
  const Folder folder;
  spawn(saved, [&](World& world) {
    Everything net;
    Adam adam(net.trained(), AdamOptions(0.01).amsgrad(true));
    int64_t epoch = 3;
    Checkpointer checkpoints(world, folder.path(), {.async = async});
    checkpoints.track("adam", adam);
    checkpoints.track("net", net);
    checkpoints.track("epoch", epoch);
    checkpoints.track_generators();
    EXPECT_EQ(checkpoints.restore_latest(), std::nullopt);
    train(net, adam, 3);
    adam.param_groups()[0].options().set_lr(0.005);
    checkpoints.save(3, {{"loss", 0.5}});
    train(net, adam, 2);  // while it is written
    checkpoints.finish();
  });
  EXPECT_THAT(verify(folder / "step-00000003"), testing::ElementsAre());
  spawn(restored, [&](World& world) {
    Everything net, expected;
    Adam adam(net.trained(), AdamOptions(0.01).amsgrad(true));
    Adam other(expected.trained(), AdamOptions(0.01).amsgrad(true));
    int64_t epoch = 0;
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.track("adam", adam);
    checkpoints.track("epoch", epoch);
    checkpoints.track_generators();
    net.scramble();
    const auto found = checkpoints.restore_latest();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->step, 3);
    EXPECT_EQ(found->metrics.at("loss"), 0.5);
    EXPECT_EQ(epoch, 3);
    train(expected, other, 3);
    other.param_groups()[0].options().set_lr(0.005);
    EXPECT_TRUE(same(net, expected));
    EXPECT_TRUE(net.tied.is_same(net.first->weight));
    train(net, adam, 2);
    train(expected, other, 2);
    EXPECT_TRUE(same(net, expected));
  });
}

// Outside of lanes all ranks draw alike, also those that were not there before.
TEST(Checkpointer, GeneratorsOfARunWithLanesAreAlikeOnAnyNumberOfRanks) {
  const Folder folder;
  const auto run = [&](World& world, bool goes_on) {
    torch::manual_seed(3);
    torch::nn::Linear net(2, 2);
    at::Generator own = at::detail::createCPUGenerator(4);
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.track_generators();
    checkpoints.track("own", own);
    if (goes_on) {
      torch::manual_seed(world.rank());
      own.set_current_seed(world.rank());
      checkpoints.restore_latest();
    }
    const Ddp ddp(net, world, {.lanes = 4});
    torch::rand({5}, own);
    if (!goes_on) checkpoints.save(1);
    const auto numbers = torch::cat({torch::rand({3}), torch::rand({3}, own)});
    const std::string mine(static_cast<const char*>(numbers.const_data_ptr()), numbers.nbytes());
    for (const auto& theirs : world.group().all_gather_bytes(mine)) EXPECT_EQ(theirs, mine);
    return numbers;
  };
  spawn(2, [&](World& world) { run(world, false); });
  spawn(4, [&](World& world) { run(world, true); });
  spawn(1, [&](World& world) { run(world, true); });
}

TEST(Checkpointer, EachGeneratorGoesOnWhereItWas) {
  const Folder folder;
  const auto numbers = [] { return torch::rand({3}); };
  spawn(2, [&](World& world) {
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track_generators();
    torch::manual_seed(world.rank());
    torch::rand({5});
    checkpoints.save(1);
    const auto expected = numbers();
    torch::manual_seed(9);
    checkpoints.restore_latest();
    EXPECT_TRUE(at::equal(numbers(), expected));
  });
  spawn(4, [&](World& world) {
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track_generators();
    checkpoints.restore_latest();
    const auto mine = numbers();
    std::vector<at::Tensor> all(4, torch::empty({3}));
    for (auto& one : all) one = torch::empty({3});
    world.group().all_gather(all, mine).wait();
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < i; ++j) EXPECT_FALSE(at::equal(all[i], all[j])) << i << j;
    }
  });
}

// What save() throws on this rank.
std::string refused(Checkpointer& checkpoints, int64_t step) {
  return message_of<CheckpointError>([&] { checkpoints.save(step); });
}

TEST(Checkpointer, RanksThatSaveDifferentThingsAreToldSo) {
  const Folder folder;
  spawn(2, [&](World& world) {
    torch::manual_seed(1);
    torch::nn::Linear net(2, 2);
    double rate = world.rank();
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.track("rate", rate);
    EXPECT_THAT(refused(checkpoints, 1), AllOf(HasSubstr("step 1 was not saved"),
                                               HasSubstr("rank 0 has value rate/value: 0"),
                                               HasSubstr("rank 1 has value rate/value: 1")));
    rate = 3;
    EXPECT_THAT(refused(checkpoints, world.rank()),
                AllOf(HasSubstr("rank 0 has step 0"), HasSubstr("rank 1 has step 1")));
    EXPECT_THAT(refused(checkpoints, -1), HasSubstr("save() of step -1"));
    checkpoints.save(2);
    EXPECT_EQ(checkpoints.restore_latest()->step, 2);
  });
}

TEST(Checkpointer, ASecondJobIsTold) {
  const Folder folder;
  spawn(2, [&](World& world) {
    int64_t value = 0;
    Checkpointer first(world, folder.path()), second(world, folder.path());
    first.track("value", value);
    second.track("value", value);
    first.save(1);
    EXPECT_THAT(refused(second, 2), AllOf(HasSubstr("rank 0: "), HasSubstr("process "),
                                          HasSubstr("another Checkpointer of it holds")));
    EXPECT_EQ(second.restore_latest()->step, 1);
    first.save(3);
  });
}

TEST(Checkpointer, SavingOrRestoringOnOneRankAloneIsNamedOnAll) {
  for (const bool saves : {true, false}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      torch::manual_seed(1);
      torch::nn::Linear net(3, 2);
      const Ddp ddp(net, world);
      Checkpointer checkpoints(world, folder.path(), {.async = true});
      checkpoints.track("net", net);
      EXPECT_THAT(message_of<CommError>([&] {
                    if (world.is_main() && saves) checkpoints.save(1);
                    if (world.is_main() && !saves) checkpoints.restore_latest();
                    net->forward(at::ones({4, 3})).sum().backward();
                  }),
                  HasSubstr("(checkpoint: "));
    });
  }
}

// The last save of a job was cut off behind the publishing, and the next job has nothing to save.
TEST(Checkpointer, RestoringReplacesALatestThatAKilledJobLeftBehind) {
  const Folder folder;
  spawn(2, [&](World& world) {
    int64_t value = 0;
    std::string first, second;
    {
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("value", value);
      checkpoints.save(1);
      if (world.is_main()) first = contents(folder / "latest");
      checkpoints.save(2);
    }
    if (world.is_main()) {
      second = contents(folder / "latest");
      write(folder / "latest", first);
    }
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("value", value);
    EXPECT_EQ(checkpoints.restore_latest()->step, 2);
    if (world.is_main()) {
      EXPECT_EQ(contents(folder / "latest"), second);
    }
  });
}

TEST(Checkpointer, WhatDoesNotFitIsListedAndAllowedByPattern) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net(5), wider(6);
    torch::nn::Linear other(3, 5);
    other->to(torch::kDouble);
    int64_t value = 4;
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.track("value", value);
    checkpoints.save(1);
    value = 5;

    Checkpointer wide(world, folder.path());
    wide.track("net", wider);
    wide.track("more", value);
    const auto told = message_of<CheckpointError>([&] { wide.restore_latest(); });
    EXPECT_THAT(told,
                AllOf(HasSubstr("does not fit what is tracked"),
                      HasSubstr("net/tied differs: float32 [5, 3] there, float32 [6, 3] here"),
                      HasSubstr("value more/value is missing"),
                      HasSubstr("value value/value is unexpected")));
    EXPECT_THAT(told, testing::Not(HasSubstr("net/large")));

    Checkpointer few(world, folder.path());
    few.track("net", *net.first);
    EXPECT_THAT(message_of<CheckpointError>([&] { few.restore_latest(); }),
                AllOf(HasSubstr("net/weight is missing: float32 [5, 3] here"),
                      HasSubstr("net/large is unexpected")));
    const auto before = net.first->weight.clone();
    few.restore_latest({.allow_missing = {"net/*"}, .allow_unexpected = {"*"}});
    EXPECT_TRUE(at::equal(net.first->weight, before));

    Checkpointer typed(world, folder.path());
    typed.track("net", net);
    net.half.set_data(net.half.to(torch::kFloat));
    EXPECT_THAT(message_of<CheckpointError>(
                    [&] { typed.restore_latest({.allow_unexpected = {"value/*"}}); }),
                HasSubstr("net/half differs: bfloat16 [7] there, float32 [7] here"));
    EXPECT_EQ(value, 5);
  });
}

// Flips a bit in the last byte of the last file.
void damage(const std::string& checkpoint, const std::string& file) {
  std::string bytes = contents(checkpoint + "/" + file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write(checkpoint + "/" + file, bytes);
}

TEST(Checkpointer, DamageIsNamedOnAllRanksAndAnOlderOneRestoredIfAsked) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net, kept;
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.save(1);
    {
      const at::NoGradGuard no_grad;
      net.large.zero_();
    }
    checkpoints.save(2);
    if (world.rank() == 0) damage(folder / "step-00000002", "shard-1-of-2.safetensors");
    world.group().barrier().wait();
    {
      const at::NoGradGuard no_grad;
      net.first->weight.zero_();
    }
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                AllOf(HasSubstr("step-00000002/shard-1-of-2.safetensors: tensor 'net/"),
                      HasSubstr("is damaged")));
    EXPECT_EQ(net.first->weight.abs().max().item<float>(), 0) << "changed";
    EXPECT_EQ(checkpoints.restore_latest({.damaged = Damaged::FallBack})->step, 1);
    EXPECT_TRUE(same(net, kept));
    EXPECT_EQ(checkpoints.restore(folder / "step-00000001").step, 1);
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore(folder / "nothing"); }),
                HasSubstr("nothing/manifest.json: cannot be opened: No such file"));
  });
}

// A disk that is full on one rank.
class FullDisk : public checkpoint::FileSystem {
 public:
  ssize_t write(int fd, const char* bytes, size_t count) override {
    errno = ENOSPC;
    return full ? -1 : FileSystem::write(fd, bytes, count);
  }
  bool full = false;
};

TEST(Checkpointer, AFullDiskOfOneRankIsAnErrorOnAll) {
  for (const bool async : {false, true}) {
    const Folder folder;
    spawn(3, [&](World& world) {
      Everything net;
      FullDisk disk;
      Checkpointer checkpoints(world, folder.path(), {.async = async, .files = &disk});
      checkpoints.track("net", net);
      checkpoints.save(1);
      checkpoints.finish();
      for (const int bad : {2, 0}) {
        disk.full = world.rank() == bad;
        const auto told = message_of<CheckpointError>([&] {
          checkpoints.save(2);
          checkpoints.finish();
        });
        EXPECT_THAT(told, AllOf(HasSubstr("step 2 was not saved"),
                                HasSubstr(fmt::format("rank {}: [checkpoint] ", bad)),
                                HasSubstr("No space left on device")));
        disk.full = false;
        EXPECT_EQ(checkpoints.restore_latest()->step, 1);
      }
      checkpoints.save(3);
      checkpoints.finish();
      EXPECT_EQ(checkpoints.restore_latest()->step, 3);
    });
    EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder.path()),
                testing::ElementsAre(".lock", "latest", "step-00000001", "step-00000003"));
  }
}

// What failed behind is told by the next save, which saves nothing itself.
TEST(Checkpointer, AFailureBehindIsToldByTheNextSave) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net;
    FullDisk disk;
    Checkpointer checkpoints(world, folder.path(), {.async = true, .files = &disk});
    checkpoints.track("net", net);
    checkpoints.save(1);
    checkpoints.finish();
    disk.full = world.rank() == 1;
    checkpoints.save(2);
    EXPECT_THAT(refused(checkpoints, 3), HasSubstr("step 2 was not saved"));
    disk.full = false;
    checkpoints.save(4);
    checkpoints.finish();
    EXPECT_EQ(checkpoints.restore_latest()->step, 4);
  });
}

// A program that forgets finish() has no other way to learn that its last save is not there.
TEST(Checkpointer, AFailureBehindThatNobodyAsksAboutIsLogged) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Everything net;
    FullDisk disk;
    testing::internal::CaptureStderr();
    {
      Checkpointer checkpoints(world, folder.path(), {.async = true, .files = &disk});
      checkpoints.track("net", net);
      disk.full = world.rank() == 1;
      checkpoints.save(1);
    }
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("step 1 was not saved") != std::string::npos, world.rank() == 0) << said;
    EXPECT_EQ(said.find("finish() at the end") != std::string::npos, world.rank() == 0) << said;
  });
}

// Memory of one piece is copied by several threads; a backward pass that still needs what was there
// says so, as after copy_().
TEST(Checkpointer, LargeTensorsAreRestoredByThreads) {
  isolated([] {
    const Folder folder;
    at::set_num_threads(3);
    torch::nn::Linear net(2049, 1027);  // 8 MB: no multiple of what a thread takes
    Checkpointer checkpoints(World::solo(), folder.path());
    checkpoints.track("net", net);
    checkpoints.save(1);
    const at::Tensor weight = net->weight.detach().clone(), bias = net->bias.detach().clone();
    {
      const at::NoGradGuard no_grad;
      net->weight.zero_();
      net->bias.zero_();
    }
    const at::Tensor loss = net->weight.square().sum();
    checkpoints.restore_latest();
    EXPECT_TRUE(at::equal(net->weight, weight));
    EXPECT_TRUE(at::equal(net->bias, bias));
    EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }),
                HasSubstr("modified by an inplace operation"));
  });
}

TEST(Checkpointer, KeepsWhatRetentionSays) {
  const Folder folder;
  spawn(2, [&](World& world) {
    int64_t value = 0;
    Checkpointer checkpoints(world, folder.path(), {.retention = {.keep_last = 2}});
    checkpoints.track("value", value);
    for (int64_t step = 1; step <= 4; ++step) checkpoints.save(step);
  });
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder.path()),
              testing::ElementsAre(".lock", "latest", "step-00000003", "step-00000004"));
}

TEST(Checkpointer, NamesAndOptimizersThatCannotBeAreRefused) {
  isolated([] {
    const Folder folder;
    torch::nn::Linear net(2, 2);
    torch::optim::LBFGS lbfgs(net->parameters());
    int64_t value = 0;
    Checkpointer checkpoints(World::solo(), folder.path());
    checkpoints.track("net", net);
    const auto track = [&](const std::string& name) {
      return message_of<ConfigError>([&] { checkpoints.track(name, value); });
    };
    EXPECT_THAT(track("net"), HasSubstr("'net' is tracked already"));
    EXPECT_THAT(track("a/b"), HasSubstr("'a/b' cannot be tracked"));
    EXPECT_THAT(track(""), HasSubstr("cannot be tracked"));
    EXPECT_THAT(message_of<ConfigError>([&] { checkpoints.track("lbfgs", lbfgs); }),
                HasSubstr("LBFGS"));
  });
}

}  // namespace
}  // namespace lockstep::test

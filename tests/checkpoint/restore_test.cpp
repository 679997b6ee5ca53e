// What is restored in several threads, tensors of every kind, and names that are not the
// same on both sides.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/stateful.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/fsdp/models.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::verify;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Enough bytes for several threads: tensors of some 1 MB, each with other numbers, and a larger
// one.
struct Wide : torch::nn::Module {
  explicit Wide(int64_t first) {
    for (int64_t i = 0; i < 24; ++i) {
      const int64_t rows = i == 7 ? 3000 : 500 + i;
      auto numbers = torch::arange(rows * 500, torch::kFloat).add_(first * (i + 1));
      numbers = i % 3 == 1 ? numbers.view({500, rows}).t() : numbers.view({rows, 500});
      register_buffer("wide" + std::to_string(i), numbers);
    }
  }
};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& tensor) {
    const at::Tensor plain = tensor.contiguous();
    return std::string(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
  };
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && bytes(a) == bytes(b);
}

void expect_same(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto others = b.named_buffers();
  for (const auto& item : a.named_buffers()) {
    EXPECT_TRUE(same_bits(item.value(), others[item.key()])) << item.key();
  }
}

class RestoreThreads : public testing::TestWithParam<std::pair<int, int>> {};

INSTANTIATE_TEST_SUITE_P(, RestoreThreads,
                         testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(1, 2),
                                         std::pair(3, 2)),
                         [](const auto& test) {
                           return "From" + std::to_string(test.param.first) + "To" +
                                  std::to_string(test.param.second);
                         });

TEST_P(RestoreThreads, GiveTheBitsOrChangeNothing) {
  const Folder folder;
  spawn(GetParam().first, [&](World& world) {
    Wide net(1);
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.save(1);
  });
  const auto restore = [&](World& world, Wide& net) {
    // One rank has 4 threads, if there are as many cores, and two have 4 by this.
    setenv("LOCAL_WORLD_SIZE", "1", 1);
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", net);
    checkpoints.restore_latest();
  };
  spawn(GetParam().second, [&](World& world) {
    Wide net(0);
    restore(world, net);
    expect_same(net, Wide(1));
  });
  // The last byte of the last file.
  const std::string file = folder / ("step-00000001/shard-" + std::to_string(GetParam().first - 1) +
                                     "-of-" + std::to_string(GetParam().first) + ".safetensors");
  std::string bytes = contents(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 4);
  write(file, bytes);
  spawn(GetParam().second, [&](World& world) {
    Wide net(0);
    EXPECT_THAT(message_of<CheckpointError>([&] { restore(world, net); }),
                AllOf(HasSubstr(file), HasSubstr("net/wide"), HasSubstr("is damaged")));
    expect_same(net, Wide(0));
  });
}

// Each kind of tensor, with memory of every layout.
struct Kinds : torch::nn::Module {
  explicit Kinds(int64_t from) {
    for (const auto dtype :
         {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kFloat8_e4m3fn,
          torch::kFloat8_e5m2, torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt,
          torch::kLong, torch::kUInt16, torch::kUInt32, torch::kUInt64, torch::kComplexFloat,
          torch::kComplexDouble}) {
      const auto name = std::string(c10::toString(dtype));
      // Fresh memory each: permutations and slices of bytes, so that each kind has any bits.
      const auto numbers = [&](at::IntArrayRef sizes) {
        int64_t count = static_cast<int64_t>(c10::elementSize(dtype));
        for (const int64_t size : sizes) count *= size;
        const int64_t values = dtype == torch::kBool ? 2 : 101;
        return torch::arange(count)
            .add(from)
            .remainder(values)
            .to(torch::kByte)
            .view(dtype)
            .view(sizes);
      };
      register_buffer(name + "_plain", numbers({3, 4, 5}));
      register_buffer(name + "_number", numbers({1}).view({}));
      register_buffer(name + "_nothing", numbers({2, 0, 3}));
      register_buffer(name + "_turned", numbers({4, 6}).t());
      register_buffer(name + "_every_second", numbers({6, 4}).slice(0, 0, 6, 2).slice(1, 1, 4, 2));
      register_buffer(name + "_channels_last", numbers({2, 3, 2, 2}).permute({0, 3, 1, 2}));
    }
  }
};

TEST(RestoreKinds, OnOtherNumbersOfRanks) {
  for (const auto& [saved, restored] : {std::pair(1, 2), std::pair(3, 1)}) {
    const Folder folder;
    spawn(saved, [&](World& world) {
      Kinds net(1);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("net", net);
      checkpoints.save(1);
    });
    EXPECT_THAT(verify(folder / "step-00000001"), ElementsAre());
    spawn(restored, [&](World& world) {
      Kinds net(0);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("net", net);
      checkpoints.restore_latest();
      expect_same(net, Kinds(1));
    });
  }
}

// As a program that looks for the folder itself, on hosts with disks of their own.
TEST(Restore, AnotherCheckpointOnEachRankIsRefused) {
  const Folder folder;
  spawn(2, [&](World& world) {
    at::Tensor weight = torch::zeros({4});
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("weight", weight);
    for (int64_t step = 1; step <= 2; ++step) {
      weight.fill_(step);
      checkpoints.save(step);
    }
    weight.fill_(7);
    const std::string one = folder / "step-00000001", two = folder / "step-00000002";
    EXPECT_THAT(
        message_of<CheckpointError>([&] { checkpoints.restore(world.rank() == 0 ? one : two); }),
        AllOf(HasSubstr("the ranks would restore different checkpoints"),
              HasSubstr("\n  rank 0 has step 1 of " + one + ", whose manifest"),
              HasSubstr("\n  rank 1 has step 2 of " + two + ", whose manifest"),
              HasSubstr("Give restore() the same checkpoint on all ranks")));
    EXPECT_TRUE(at::equal(weight, torch::full({4}, 7.0))) << "changed";
    // The same checkpoint in two places is one.
    if (world.rank() == 1) std::filesystem::copy(two, folder / "copy");
    world.group().barrier().wait();
    const auto restored = checkpoints.restore(world.rank() == 0 ? two : folder / "copy");
    EXPECT_EQ(restored.step, 2);
    EXPECT_TRUE(at::equal(weight, torch::full({4}, 2.0)));
  });
}

struct Bare : torch::nn::Module {};

// The checkpoint has a tied parameter under one of its names, which is not the first one here.
TEST(Restore, OneNameOfATiedParameterIsEnough) {
  const Folder folder;
  for (const bool own : {false, true}) {
    spawn(2, [&](World& world) {
      const CheckpointerOptions options{.each_rank = own ? std::vector<std::string>{"net"}
                                                         : std::vector<std::string>()};
      const std::string path = folder / (own ? "own" : "common");
      const double value = own ? 5.0 + world.rank() : 5.0;
      Bare saved, net;
      saved.register_parameter("body", torch::full({3}, value));
      Checkpointer first(world, path, options);
      first.track("net", saved);
      first.save(1);
      const at::Tensor tied = net.register_parameter("ahead", torch::zeros({3}));
      net.register_parameter("body", tied);
      Checkpointer second(world, path, options);
      second.track("net", net);
      second.restore_latest();
      EXPECT_TRUE(at::equal(tied, torch::full({3}, value)));
    });
  }
}

TEST(Restore, ANameOfATiedParameterThatIsNotTheFirstUnderFsdp) {
  const Folder folder;
  spawn(1, [&](World& world) {
    Bare saved;
    saved.register_parameter("body", torch::arange(5.0));
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", saved);
    checkpoints.save(1);
  });
  spawn(2, [&](World& world) {
    Bare net;
    net.register_parameter("body", net.register_parameter("ahead", torch::zeros({5})));
    Fsdp fsdp(net, world.group());
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("net", fsdp);
    checkpoints.restore_latest();
    for (const auto& shard : fsdp.shards()) {
      EXPECT_TRUE(at::equal(shard.shard, part_of_shard(torch::arange(5.0), shard)));
    }
  });
}

TEST(Restore, ABufferMadeByExpand) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto run = [&](double value) {
      Bare net;
      net.register_parameter("weight", torch::zeros({2}));
      net.register_buffer("mask", torch::linspace(0, value, 4).unsqueeze(0).expand({8, 4}));
      Ddp ddp(net, world);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("net", net);
      if (!checkpoints.restore_latest()) checkpoints.save(1);
      return net.named_buffers()["mask"].clone();
    };
    const at::Tensor saved = run(1);
    EXPECT_TRUE(at::equal(run(7), saved));
  });
}

// As a program has it whose first step makes the state.
TEST(Restore, ATensorThatIsUndefined) {
  const Folder folder;
  at::Tensor hidden, never;
  Checkpointer checkpoints(World::solo(), folder.path());
  checkpoints.track("hidden", hidden);
  checkpoints.track("never", never);
  hidden = torch::arange(5.0);
  checkpoints.save(1);
  hidden = at::Tensor();
  checkpoints.restore_latest();
  EXPECT_TRUE(at::equal(hidden, torch::arange(5.0)));
  EXPECT_FALSE(never.defined());
  never = torch::zeros({2});
  EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
              HasSubstr("never/tensor is missing"));
}

// Letters that mean something in a pattern are plain ones in a name.
TEST(Restore, NamesWithBracketsAndStars) {
  EXPECT_EQ(checkpoint::pattern_of("a[0]*?\\.w"), "a\\[0\\]\\*\\?\\\\.w");
  const Folder folder;
  spawn(2, [&](World& world) {
    at::Tensor buffer = torch::full({2}, world.rank(), torch::kFloat);
    at::Tensor other = torch::full({2}, 3.0 + world.rank());
    auto noise = at::make_generator<at::CPUGeneratorImpl>(world.rank() + 5);
    Checkpointer checkpoints(world, folder / "own", {.each_rank = {"buffer*", "other[1]"}});
    checkpoints.track("buffer[0]", buffer);
    checkpoints.track("other[1]", other);
    checkpoints.track("noise[?*]", noise);
    checkpoints.save(1);
    const at::Tensor expected = at::rand({3}, noise);
    buffer.fill_(9);
    other.fill_(9);
    checkpoints.restore_latest();
    EXPECT_EQ(buffer[0].item<double>(), world.rank());
    EXPECT_EQ(other[0].item<double>(), 3.0 + world.rank());
    EXPECT_TRUE(at::equal(at::rand({3}, noise), expected));
  });
  spawn(2, [&](World& world) {
    torch::manual_seed(1);
    Bare net;
    auto first = net.register_module("block[0]", torch::nn::Linear(1, 1));
    auto second = net.register_module("block[1]\\", torch::nn::Linear(1, 1));
    ZeroOptimizer adam(net.parameters(), world.group(),
                       zero<torch::optim::Adam>(torch::optim::AdamOptions(0.1)));
    second->forward(first->forward(torch::ones({2, 1}))).sum().backward();
    adam.step();
    Checkpointer checkpoints(world, folder / "zero");
    checkpoints.track("net*", net);
    checkpoints.track("adam[1]", adam);
    checkpoints.save(1);
    const at::Tensor weight = first->weight.detach().clone();
    adam.step();
    checkpoints.restore_latest();
    EXPECT_TRUE(at::equal(first->weight, weight));
  });
  spawn(2, [&](World& world) {
    torch::manual_seed(1);
    Bare net;
    auto first = net.register_module("block[0]", torch::nn::Linear(1, 1));
    net.register_module("block[1]", torch::nn::Linear(1, 1));
    const at::Tensor weight = first->weight.detach().clone();
    Fsdp fsdp(net, world.group());
    Checkpointer checkpoints(world, folder / "fsdp");
    checkpoints.track("net", fsdp);
    checkpoints.save(1);
    {
      const at::NoGradGuard no_grad;
      for (auto& part : fsdp.parameters()) part.zero_();
    }
    checkpoints.restore_latest();
    EXPECT_FALSE(fsdp.shards().empty());
    for (const auto& shard : fsdp.shards()) {
      if (shard.name != "block[0].weight") continue;
      EXPECT_TRUE(at::equal(shard.shard, part_of_shard(weight, shard)));
    }
  });
}

template <class Net>
void step_down(Net& net, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  at::Tensor loss = torch::zeros({});
  for (const auto& parameter : net.parameters()) loss = loss + parameter.square().sum();
  loss.backward();
  optimizer.step();
}

// libtorch's Adagrad takes a state for granted that its constructor makes.
TEST(Restore, AnOptimizerStepsWithALayerThatTheCheckpointDoesNotHave) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto with = [&](const std::string& name, bool has_more, const auto& make,
                          const auto& body) {
      torch::nn::Module net;
      net.register_parameter("a", torch::ones({3}));
      if (has_more) net.register_parameter("b", torch::ones({5}));
      const auto optimizer = make(net.parameters());
      Checkpointer checkpoints(world, folder / name);
      checkpoints.track("net", net);
      checkpoints.track("optimizer", *optimizer);
      body(net, *optimizer, checkpoints);
    };
    const auto check = [&](const std::string& name, const auto& make) {
      with(name, false, make, [](auto& net, auto& optimizer, auto& checkpoints) {
        step_down(net, optimizer);
        checkpoints.save(1);
      });
      with(name, true, make, [&](auto& net, auto& optimizer, auto& checkpoints) {
        checkpoints.restore_latest({.allow_missing = {"net/b"}});
        const at::Tensor before = net.named_parameters()["b"].detach().clone();
        step_down(net, optimizer);
        EXPECT_FALSE(at::equal(net.named_parameters()["b"], before)) << name;
      });
    };
    check("adagrad", [](const auto& parameters) {
      return std::make_unique<torch::optim::Adagrad>(parameters, torch::optim::AdagradOptions(0.1));
    });
    check("zero_adagrad", [&](const auto& parameters) {
      return std::make_unique<ZeroOptimizer>(
          parameters, world.group(),
          zero<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1)));
    });
    check("adam", [](const auto& parameters) {
      return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.1));
    });
  });
}

// An optimizer's state is by the first name, which need not be the same in the next run.
TEST(Restore, TiedParametersMayBeRegisteredInAnotherOrder) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto with = [&](const std::vector<std::string>& order, const auto& make,
                          const std::string& name, const auto& body) {
      torch::nn::Module net;
      const at::Tensor tied = net.register_parameter(order[0], torch::ones({5}));
      for (size_t i = 1; i < order.size(); ++i) net.register_parameter(order[i], tied);
      const auto optimizer = make(std::vector<at::Tensor>{tied});
      Checkpointer checkpoints(world, folder / name);
      checkpoints.track("net", net);
      checkpoints.track("optimizer", *optimizer);
      body(*optimizer, checkpoints, tied);
    };
    const auto check = [&](const std::string& name, const auto& make) {
      at::Tensor expected;
      const auto train = [](auto& optimizer, const at::Tensor& tied) {
        optimizer.zero_grad();
        tied.square().sum().backward();
        optimizer.step();
      };
      with({"a", "b"}, make, name, [&](auto& optimizer, auto& checkpoints, const at::Tensor& tied) {
        train(optimizer, tied);
        checkpoints.save(1);
        train(optimizer, tied);
        expected = tied.detach().clone();
      });
      for (const auto& order :
           {std::vector<std::string>{"b", "a"}, std::vector<std::string>{"b"}}) {
        with(order, make, name, [&](auto& optimizer, auto& checkpoints, const at::Tensor& tied) {
          checkpoints.restore_latest();
          train(optimizer, tied);
          EXPECT_TRUE(at::equal(tied, expected)) << name;
        });
      }
    };
    const auto options = torch::optim::AdamOptions(0.1);
    check("adam", [&](const auto& parameters) {
      return std::make_unique<torch::optim::Adam>(parameters, options);
    });
    check("zero", [&](const auto& parameters) {
      return std::make_unique<ZeroOptimizer>(parameters, world.group(),
                                             zero<torch::optim::Adam>(options));
    });
  });
}

}  // namespace
}  // namespace lockstep::test

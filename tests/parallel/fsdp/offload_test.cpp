// Fsdp whose shards lie in files: the bits of those in memory, without the memory.
#include <gmock/gmock.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/parallel/deferred_init.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"
#include "parallel/fsdp/models.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using parallel::FsdpOptions, parallel::Offload;
using testing::HasSubstr;
using torch::optim::AdamWOptions;

// Steps with accumulation of both kinds and clipping, and an evaluation after each.
template <class Optimizer>
std::vector<at::Tensor> trained_tower(World& world, FsdpOptions options, Optimizer optimizer_of) {
  Tower net;
  net->blocks[1]->up->weight.requires_grad_(false);
  options.units = units_of<BlockImpl>(*net);
  Fsdp fsdp(net, world.group(), options);
  auto optimizer = optimizer_of(fsdp.parameters());
  for (int step = 0; step < 3; ++step) {
    fsdp.zero_grad();
    {
      const auto hold = fsdp.hold();
      tower_loss(net, world.rank(), 3 * step).backward();
    }
    tower_loss(net, world.rank(), 3 * step + 1).backward();
    tower_loss(net, world.rank(), 3 * step + 2).backward();
    fsdp.clip_grad_norm_(0.5);
    optimizer.step();
    const at::NoGradGuard no_grad;
    tower_loss(net, world.rank(), step);
  }
  fsdp.unshard();
  std::vector<at::Tensor> all;
  for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().clone());
  return all;
}

TEST(FsdpOffload, FilesHaveTheBitsOfMemory) {
  const std::vector<FsdpOptions> cases = {
      {.sharding = parallel::Sharding::Gradients},
      {.sharding = parallel::Sharding::None},
      {.reshard_ranks = 1},
      {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
  };
  const auto adam = [](auto leaves) { return FusedAdamW(leaves, AdamWOptions(0.01)); };
  const auto sgd = [](auto leaves) {
    return FusedSGD(leaves, torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  const auto torch_adam = [](auto leaves) {
    return torch::optim::AdamW(leaves, AdamWOptions(0.01));
  };
  const Folder folder;
  for (const int ranks : {1, 2, 3}) {
    spawn(ranks, [&](World& world) {
      const auto expect_same = [&](FsdpOptions options, const auto& optimizer_of) {
        const auto want = trained_tower(world, options, optimizer_of);
        options.offload = Offload::File;
        options.offload_folder = folder.path();
        const auto have = trained_tower(world, options, optimizer_of);
        for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(have[i], want[i])) << i;
      };
      expect_same({}, adam);
      if (world.size() != 2) return;
      for (const auto& options : cases) expect_same(options, adam);
      expect_same({}, sgd);
      expect_same({}, torch_adam);
    });
  }
}

TEST(FsdpOffload, LanesInFilesHaveTheHashOfThoseInMemory) {
  const auto hash_of = [](World& world, FsdpOptions options) {
    Tower net;
    options.units = units_of<BlockImpl>(*net);
    options.lanes = 4;
    Fsdp fsdp(net, world.group(), options);
    FusedAdamW adam(fsdp.parameters(), AdamWOptions(0.01));
    for (int step = 0; step < 2; ++step) {
      fsdp.zero_grad();
      for (const Lane lane : fsdp.lanes(StepKey{.seed = 1, .step = step})) {
        tower_loss(net, static_cast<int>(lane.index), step).backward();
      }
      adam.step();
    }
    return fsdp.fingerprint();
  };
  const Folder folder;
  for (const int ranks : {1, 2, 3}) {
    spawn(ranks, [&](World& world) {
      EXPECT_EQ(hash_of(world, {.offload = Offload::File, .offload_folder = folder.path()}),
                hash_of(world, {}));
    });
  }
}

// Of this process, that nothing but memory holds: the kernel writes files' pages to the disk.
int64_t anonymous_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("RssAnon:")) return 1024 * std::stoll(line.substr(8));
  }
  return 0;
}

struct WideImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 512, kLayers = 24;

  WideImpl() {
    torch::manual_seed(1);
    torch::nn::ModuleList list;
    for (int64_t i = 0; i < kLayers; ++i) {
      layers.emplace_back(kWidth, kWidth);
      list->push_back(layers.back());
    }
    register_module("layers", list);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = call(layer, x).tanh();
      most = std::max(most, anonymous_bytes());
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  int64_t most = 0;
};
TORCH_MODULE(Wide);

// How much anonymous memory a rank has at most in three steps, besides what it had before.
int64_t memory_of_training(World& world, FsdpOptions options) {
  mallopt(M_MMAP_THRESHOLD, 1 << 17);  // freed memory is the kernel's again
  {
    torch::nn::Linear warm(8, 8);
    warm(torch::ones({2, 8})).sum().backward();
  }
  const int64_t before = anonymous_bytes();
  Wide net = [] {
    const DeferredInit deferred;
    return Wide();
  }();
  options.units = units_of<torch::nn::LinearImpl>(*net);
  options.share_memory = false;
  Fsdp fsdp(net, world.group(), options);
  FusedAdamW adam(fsdp.parameters(), AdamWOptions(1e-3));
  const at::Tensor x = torch::ones({2, WideImpl::kWidth});
  for (int step = 0; step < 3; ++step) {
    fsdp.zero_grad();
    call(net, x).square().mean().backward();
    net->most = std::max(net->most, anonymous_bytes());
    adam.step();
    net->most = std::max(net->most, anonymous_bytes());
  }
  return net->most - before;
}

TEST(FsdpOffload, WhatLiesInFilesTakesNoMemory) {
  constexpr int64_t kParameters = 4 * WideImpl::kLayers * WideImpl::kWidth * WideImpl::kWidth;
  const Folder folder(Folder::On::Disk);
  for (const int ranks : {1, 2}) {
    // A process each: what one has freed is no memory of the other.
    spawn(ranks, [&](World& world) {
      EXPECT_GT(memory_of_training(world, {}), 7 * kParameters / 2 / world.size());
    });
    spawn(ranks, [&](World& world) {
      const int64_t most =
          memory_of_training(world, {.offload = Offload::File, .offload_folder = folder.path()});
      EXPECT_LT(most, kParameters / 2);
      EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    });
  }
}

// The optimizer's state comes with its first step.
TEST(FsdpOffload, ARelativeFolderStaysWhenTheProgramChangesItsWorkingDirectory) {
  const Folder folder;
  std::filesystem::create_directory(folder / "files");
  spawn(2, [&](World& world) {
    std::filesystem::current_path(folder.path());
    Tower net;
    Fsdp fsdp(net, world.group(), {.offload = Offload::File, .offload_folder = "files"});
    FusedAdamW adam(fsdp.parameters(), AdamWOptions(0.01));
    std::filesystem::current_path("/");
    tower_loss(net, world.rank(), 0).backward();
    adam.step();
  });
}

TEST(FsdpOffload, AFolderWithoutRoomIsNamedOnAllRanks) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Tower net;
    const auto fails = [&](const std::string& in) {
      return message_of<ConfigError>([&] {
        const Fsdp fsdp(net, world.group(), {.offload = Offload::File, .offload_folder = in});
      });
    };
    EXPECT_THAT(fails(world.rank() == 1 ? "" : folder.path()),
                HasSubstr("rank 1: offload_folder '': it goes with Offload::File"));
    EXPECT_THAT(fails("/nowhere/at/all"),
                testing::AllOf(HasSubstr("rank 0: offload_folder '/nowhere/at/all'"),
                               HasSubstr("No such file or directory")));
    if (world.rank() == 1) {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit small{.rlim_cur = 10000, .rlim_max = 10000};
      setrlimit(RLIMIT_FSIZE, &small);
    }
    EXPECT_THAT(fails(folder.path()),
                testing::AllOf(HasSubstr("rank 1: offload_folder '" + folder.path() + "'"),
                               HasSubstr("File too large")));
    EXPECT_THAT(fails(""), HasSubstr("Offload::File needs one"));
  });
}

}  // namespace
}  // namespace lockstep::test

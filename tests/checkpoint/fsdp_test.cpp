// A divided model's checkpoint is any other's: units, ranks and Ddp may change between save and
// restore.
#include "lockstep/parallel/fsdp.h"

#include <gmock/gmock.h>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/parallel/deferred_init.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/stateful.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/counted_memory.h"
#include "parallel/fsdp/models.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::AdamWOptions;

// Every rank has the same batch, so that the number of ranks changes no bit of the averages.
template <class Optimizer>
void train(Tower& net, Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    tower_loss(net, 0, step).backward();
    optimizer.step();
  }
}

// Steps 0 and 1 are saved, steps 2 and 3 come after restoring.
enum class Kind { Blocks, Root, Gathered, Replicated, InFiles, Ddp, Zero };

void run(World& world, Kind kind, const std::string& folder, bool restores) {
  Tower net(restores ? 9 : 0);
  const Group& group = world.group();
  Checkpointer checkpoints(group, folder);
  const auto go = [&](auto& model, auto& optimizer) {
    checkpoints.track("net", model);
    checkpoints.track("adam", optimizer);
    if (restores) {
      checkpoints.restore_latest();
      train(net, optimizer, 2, 4);
    } else {
      train(net, optimizer, 0, 2);
      checkpoints.save(2);
    }
  };
  Tower expected;
  FusedAdamW whole(expected->parameters(), AdamWOptions(0.01));
  train(expected, whole, 0, restores ? 4 : 2);
  const auto wanted = expected->named_parameters();
  if (kind == Kind::Ddp || kind == Kind::Zero) {
    Ddp ddp(net, group);
    if (kind == Kind::Ddp) {
      FusedAdamW adam(net->parameters(), AdamWOptions(0.01));
      go(net, adam);
    } else {
      ZeroOptimizer adam(net->parameters(), group, zero<FusedAdamW>(AdamWOptions(0.01)));
      go(net, adam);
    }
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(at::equal(item.value(), wanted[item.key()])) << item.key();
    }
    return;
  }
  FsdpOptions options{.share_memory = kind != Kind::Gathered};
  if (kind != Kind::Root) options.units = units_of<BlockImpl>(*net);
  if (kind == Kind::Replicated && world.size() % 2 == 0) options.shard_ranks = world.size() / 2;
  const Folder files;
  if (kind == Kind::InFiles) {
    options.offload = Offload::File;
    options.offload_folder = files.path();
  }
  Fsdp fsdp(net, group, options);
  FusedAdamW adam(fsdp.parameters(), AdamWOptions(0.01));
  go(fsdp, adam);
  for (const auto& shard : fsdp.shards()) {
    EXPECT_TRUE(at::equal(shard.shard, part_of_shard(wanted[shard.name], shard))) << shard.name;
  }
}

TEST(FsdpCheckpoint, ChangesUnitsRanksAndKindBetweenSaveAndRestore) {
  struct Change {
    Kind from;
    int ranks_from;
    Kind to;
    int ranks_to;
  };
  for (const auto& [from, ranks_from, to, ranks_to] : std::vector<Change>{
           {Kind::Blocks, 2, Kind::Ddp, 1},
           {Kind::Ddp, 2, Kind::Blocks, 4},
           {Kind::Blocks, 4, Kind::Root, 2},
           {Kind::Gathered, 2, Kind::Zero, 2},
           {Kind::Zero, 4, Kind::Gathered, 2},
           {Kind::Replicated, 4, Kind::Blocks, 1},
           {Kind::Root, 1, Kind::Replicated, 4},
           {Kind::InFiles, 2, Kind::Ddp, 1},
           {Kind::Blocks, 2, Kind::InFiles, 4},
           {Kind::InFiles, 1, Kind::InFiles, 2},
       }) {
    SCOPED_TRACE(::testing::Message() << static_cast<int>(from) << " on " << ranks_from << " to "
                                      << static_cast<int>(to) << " on " << ranks_to);
    const Folder folder;
    spawn(ranks_from, [&](World& world) { run(world, from, folder.path(), false); });
    spawn(ranks_to, [&](World& world) { run(world, to, folder.path(), true); });
  }
}

// What programs with a full state dict write as `if (rank == 0) save()`. The others are at their
// next step by then.
TEST(FsdpCheckpoint, SavingOnRankZeroAloneIsNamedOnAllRanks) {
  for (const bool share : {true, false}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      Tower net;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      FusedAdamW adam(fsdp.parameters(), AdamWOptions(0.01));
      Checkpointer checkpoints(world.group(), folder.path());
      checkpoints.track("net", fsdp);
      checkpoints.track("adam", adam);
      EXPECT_THAT(message_of<CommError>([&] {
                    train(net, adam, 0, 1);
                    if (world.is_main()) checkpoints.save(1);
                    train(net, adam, 1, 2);
                  }),
                  AllOf(HasSubstr("(checkpoint: begins"), HasSubstr("Fsdp")));
    });
    EXPECT_TRUE(checkpoint::list_checkpoints(folder.path()).checkpoints.empty());
  }
}

torch::nn::Sequential many_layers(uint64_t seed) {
  torch::manual_seed(seed);
  torch::nn::Sequential layers;
  for (int i = 0; i < 20; ++i) layers->push_back(torch::nn::Linear(200, 200));
  return layers;
}

TEST(FsdpCheckpoint, IsRestoredWithoutTheWholeModelInMemory) {
  const Folder folder;
  const torch::nn::Sequential saved = many_layers(1);
  spawn(1, [&](World& world) {
    Checkpointer checkpoints(world.group(), folder.path());
    auto net = saved;
    checkpoints.track("net", net);
    checkpoints.save(1);
  });
  spawn(2, [&](World& world) {
    constexpr int64_t kOneLayer = 4 * (200 * 200 + 200);  // bytes
    CountedMemory memory;
    auto net = [] {
      const DeferredInit deferred;
      return many_layers(2);
    }();
    Fsdp fsdp(net, world.group(),
              {.units = units_of<torch::nn::LinearImpl>(*net), .share_memory = false});
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("net", fsdp);
    checkpoints.restore_latest();
    EXPECT_LT(memory.peak(), (10 + 6) * kOneLayer);
    const auto wanted = saved->named_parameters();
    for (const auto& shard : fsdp.shards()) {
      EXPECT_TRUE(at::equal(shard.shard, part_of_shard(wanted[shard.name], shard))) << shard.name;
    }
  });
}

// What it ignores every rank has whole.
TEST(FsdpCheckpoint, HasWhatFsdpIgnores) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Tower net;
    const at::Tensor count = net->register_buffer("count", torch::arange(3.0));
    Fsdp fsdp(net, world.group(),
              {.units = units_of<BlockImpl>(*net), .ignore = {"head.bias", "count"}});
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("net", fsdp);
    const at::Tensor bias = net->head->bias.detach().clone();
    checkpoints.save(1);
    {
      const at::NoGradGuard no_grad;
      net->head->bias.fill_(7);
      count.fill_(7);
    }
    checkpoints.restore_latest();
    EXPECT_TRUE(at::equal(net->head->bias, bias));
    EXPECT_TRUE(at::equal(count, torch::arange(3.0)));
  });
}

TEST(FsdpCheckpoint, IsReadableWhenATiedParameterIsIgnored) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Tower net;
    net->register_parameter("tied", net->words->weight);
    Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .ignore = {"tied"}});
    Checkpointer checkpoints(world.group(), folder.path(), {.retention = {.keep_last = 1}});
    checkpoints.track("net", fsdp);
    const at::Tensor words = net->words->weight.detach().clone();
    checkpoints.save(1);
    {
      const at::NoGradGuard no_grad;
      net->words->weight.fill_(7);
    }
    checkpoints.restore_latest();
    EXPECT_TRUE(at::equal(net->words->weight, words));
  });
  EXPECT_THAT(checkpoint::verify(*checkpoint::newest_checkpoint(folder.path())),
              testing::IsEmpty());
}

// Each is in the checkpoint of the one that divides it.
TEST(FsdpCheckpoint, LeavesOutWhatAnotherFsdpDivides) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Tower net;
    net->blocks[0]->norm->weight.requires_grad_(false);
    std::vector<std::string> names;
    for (const auto& item : net->blocks[0]->named_parameters()) {
      names.push_back("blocks.0." + item.key());
    }
    Fsdp rest(net, world.group(), {.share_memory = false, .ignore = names});
    Fsdp block(net->blocks[0], world.group(), {.share_memory = false});
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("block", block);
    checkpoints.track("rest", rest);
    checkpoints.save(1);
    checkpoints.restore_latest();
  });
  const checkpoint::Checkpoint saved(*checkpoint::newest_checkpoint(folder.path()));
  EXPECT_TRUE(saved.manifest().tensors.contains("block/up.weight"));
  EXPECT_FALSE(saved.manifest().tensors.contains("rest/blocks.0.up.weight"));
  EXPECT_FALSE(saved.manifest().tensors.contains("rest/blocks.0.norm.weight"));
}

// A parameter without elements has a count of steps and empty moments, which one rank saves.
TEST(FsdpCheckpoint, HasTheStateOfAParameterWithoutElements) {
  struct Net : torch::nn::Module {
    Net() {
      some = register_parameter("some", torch::ones({5}));
      none = register_parameter("none", torch::ones({0, 3}));
    }
    at::Tensor forward(const at::Tensor& x) { return (some * x).sum() + none.sum(); }
    at::Tensor some, none;
  };
  const auto step = [](Net& net, torch::optim::Optimizer& optimizer) {
    optimizer.zero_grad();
    call(net, torch::ones({5})).backward();
    optimizer.step();
  };
  for (const int shard_ranks : {0, 1}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      const auto net = std::make_shared<Net>();
      Fsdp fsdp(*net, world.group(), {.shard_ranks = shard_ranks});
      torch::optim::Adam adam(fsdp.parameters(), torch::optim::AdamOptions(0.1));
      FusedAdamW fused(fsdp.parameters(), AdamWOptions(0.1));
      Checkpointer checkpoints(world.group(), folder.path());
      checkpoints.track("net", fsdp);
      checkpoints.track("adam", adam);
      checkpoints.track("fused", fused);
      step(*net, adam);
      step(*net, fused);
      checkpoints.save(1);
      checkpoints.restore_latest();
    });
    EXPECT_THAT(checkpoint::verify(folder / "step-00000001"), testing::IsEmpty());
    spawn(2, [&](World& world) {
      const auto net = std::make_shared<Net>();
      Ddp ddp(*net, world.group());
      torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.1));
      FusedAdamW fused(net->parameters(), AdamWOptions(0.1));
      Checkpointer checkpoints(world.group(), folder.path());
      checkpoints.track("net", net);
      checkpoints.track("adam", adam);
      checkpoints.track("fused", fused);
      checkpoints.restore_latest();
      EXPECT_EQ(adam.state().size(), 2U);
      step(*net, adam);
      step(*net, fused);
    });
  }
}

// What the next forward sees.
TEST(FsdpCheckpoint, IsSeenByTheNextForward) {
  for (const bool share : {true, false}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      Tower net;
      Fsdp fsdp(net, world.group(),
                {.units = units_of<BlockImpl>(*net),
                 .share_memory = share,
                 .param_dtype = at::kBFloat16});
      Checkpointer checkpoints(world.group(), folder.path());
      checkpoints.track("net", fsdp);
      torch::optim::SGD sgd(fsdp.parameters(), 0.5);
      const auto scores = [&] {
        const at::NoGradGuard no_grad;
        return call(net, tower_input(0));
      };
      const at::Tensor before = scores();
      checkpoints.save(0);
      train(net, sgd, 0, 2);
      EXPECT_FALSE(at::equal(scores(), before));
      checkpoints.restore_latest();
      EXPECT_TRUE(at::equal(scores(), before));
    });
  }
}

// Another is made in its place, as to unfreeze a layer.
TEST(FsdpCheckpoint, ATrackedFsdpEndsWhenItIsDestroyed) {
  for (const bool share : {true, false}) {
    const Folder folder;
    spawn(2, [&](World& world) {
      Tower net;
      const parallel::FsdpOptions options{.units = units_of<BlockImpl>(*net),
                                          .share_memory = share};
      auto fsdp = std::make_unique<Fsdp>(net, world.group(), options);
      Checkpointer checkpoints(world.group(), folder.path());
      checkpoints.track("net", *fsdp);
      checkpoints.save(0);
      auto moved = std::make_unique<Fsdp>(std::move(*fsdp));
      fsdp.reset();
      checkpoints.save(1);
      checkpoints.restore_latest();
      moved->unshard();
      moved.reset();
      EXPECT_TRUE(at::isfinite(net->forward(tower_input(0))).all().item<bool>());
      Fsdp next(net, world.group(), options);
      for (const auto& call : {+[](Checkpointer& all) { all.save(2); },
                               +[](Checkpointer& all) { (void)all.restore_latest(); }}) {
        EXPECT_THAT(message_of<CheckpointError>([&] { call(checkpoints); }),
                    HasSubstr("the Fsdp that is tracked as net is not there any more: for the one "
                              "in its place destroy this Checkpointer, which holds the directory, "
                              "and make another"));
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::test

// Fsdp together with what else a training step has.
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/global_mean.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/fsdp/models.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor feature_input(int rank, int step = 0) {
  auto generator = at::detail::createCPUGenerator(1000 * step + rank);
  return at::randn({4, 40}, generator);
}

struct SeveralDtypesImpl : torch::nn::Module {
  SeveralDtypesImpl() {
    torch::manual_seed(6);
    wide = register_parameter("wide", torch::randn({40, 70}, at::kDouble));
    narrow = register_parameter("narrow", torch::randn({70, 40}));
    turned = register_parameter("turned", torch::randn({30, 40}).t());
    complex = register_parameter("complex", torch::randn({30}, at::kComplexFloat));
    none = register_parameter("none", torch::empty({0}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::tanh(x.to(at::kDouble).matmul(wide)).to(at::kFloat).matmul(narrow);
    return y.matmul(turned) * at::real(complex) + none.sum();
  }
  at::Tensor wide, narrow, turned, complex, none;
};
TORCH_MODULE(SeveralDtypes);

TEST(FsdpFeatures, ParametersOfSeveralDtypesAndLayouts) {
  for (const bool share : {true, false}) {
    spawn(3, [share](World& world) {
      const SeveralDtypes net, usual;
      Fsdp fsdp(net, world.group(), {.share_memory = share});
      Ddp ddp(usual, world.group());
      torch::optim::SGD divided(fsdp.parameters(), 0.1), whole(usual->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        fsdp.zero_grad();
        ddp.zero_grad();
        call(net, feature_input(world.rank(), step)).square().mean().backward();
        call(usual, feature_input(world.rank(), step)).square().mean().backward();
        divided.step();
        whole.step();
      }
      fsdp.unshard();
      const auto parameters = net->parameters(), wanted = usual->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_EQ(parameters[i].strides(), wanted[i].strides());
        EXPECT_TRUE(at::equal(parameters[i], wanted[i])) << i;
      }
    });
  }
}

struct NormalisedImpl : torch::nn::Module {
  NormalisedImpl() {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(40, 30));
    norm = register_module("norm", SyncBatchNorm1d(30));
    last = register_module("last", torch::nn::Linear(30, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    return call(last, torch::relu(call(norm, call(first, x))));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  SyncBatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normalised);

TEST(FsdpFeatures, SynchronousNormalisationSchedulersAndMeans) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      const Group& group = world.group();
      const Normalised net, usual;
      convert_sync_batch_norm(net, group);
      convert_sync_batch_norm(usual, group);
      Fsdp fsdp(
          net, group,
          {.units = {net->first.ptr(), net->norm.ptr(), net->last.ptr()}, .share_memory = share});
      Ddp ddp(usual, group);
      FusedAdamW divided(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
      FusedAdamW whole(usual->parameters(), torch::optim::AdamWOptions(0.01));
      LrScheduler slower(divided, parallel::exponential_lr(0.5)),
          other(whole, parallel::exponential_lr(0.5));
      const auto step_of = [&](const Normalised& model, int step,
                               const std::vector<at::Tensor>& parameters, auto& adam, auto& rate) {
        GlobalMean mean(group);
        call(model, feature_input(world.rank(), step)).square().sum().backward();
        mean.add(3 + world.rank());
        mean.scale_gradients_(parameters);
        adam.step();
        rate.step();
      };
      for (int step = 0; step < 3; ++step) {
        fsdp.zero_grad();
        ddp.zero_grad();
        step_of(net, step, fsdp.parameters(), divided, slower);
        step_of(usual, step, usual->parameters(), whole, other);
      }
      expect_same_parameters(fsdp, net, usual);
      const auto buffers = net->buffers(), wanted = usual->buffers();
      for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(at::equal(buffers[i], wanted[i]));
    });
  }
}

TEST(FsdpFeatures, ComputesUnderAutocast) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      const Tower net, usual;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      Ddp ddp(usual, world.group());
      const auto loss = [&](const Tower& model) {
        const Autocast autocast(at::kCPU, at::kBFloat16);
        return tower_loss(model, world.rank(), 0);
      };
      loss(net).backward();
      loss(usual).backward();
      expect_same_gradients(fsdp, usual, 0);
    });
  }
}

TEST(FsdpFeatures, ReshardsToASmallerGroupAfterForward) {
  spawn(4, [](World& world) {
    const Tower net, usual;
    Fsdp fsdp(net, world.group(),
              {.units = units_of<BlockImpl>(*net), .reshard_ranks = 2, .share_memory = false});
    Ddp ddp(usual, world.group());
    FusedAdamW divided(fsdp.parameters(), torch::optim::AdamWOptions(0.01));
    FusedAdamW whole(usual->parameters(), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 3; ++step) {
      fsdp.zero_grad();
      ddp.zero_grad();
      const at::Tensor loss = tower_loss(net, world.rank(), step);
      EXPECT_THAT(message_of<c10::Error>([&] { net->blocks[1]->up->weight.sum(); }),
                  HasSubstr("has no memory"));
      loss.backward();
      tower_loss(usual, world.rank(), step).backward();
      divided.step();
      whole.step();
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(call(net, tower_input(0)), call(usual, tower_input(0))));
    }
    expect_same_parameters(fsdp, net, usual);
    EXPECT_THAT(
        message_of<ConfigError>([&] { Fsdp(Tower(), world.group(), {.reshard_ranks = 3}); }),
        HasSubstr("reshard_ranks = 3 of 4 ranks"));
  });
}

struct HookedImpl : torch::nn::Module {
  explicit HookedImpl(double times) : factor(times) {
    torch::manual_seed(8);
    first = register_module("first", torch::nn::Linear(40, 60));
    middle = register_module("middle", torch::nn::Linear(60, 60));
    last = register_module("last", torch::nn::Linear(60, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = call(middle, torch::tanh(call(first, x)));
    y.register_hook([this](const at::Tensor& gradient) { return gradient * factor; });
    return call(last, y);
  }
  double factor;
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};
TORCH_MODULE(Hooked);

TEST(FsdpFeatures, HooksSeeAndChangeTheGradientsOfThisRank) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      const double factor = 1.5 + world.rank();
      const Hooked net(factor), usual(factor);
      int64_t seen = 0;
      const auto watch = [&](const at::Tensor& parameter) {
        parameter.register_hook([&seen, factor](const at::Tensor& gradient) {
          seen += gradient.numel();
          return gradient * factor;
        });
      };
      for (const auto& model : {net, usual}) watch(model->middle->weight);
      Fsdp fsdp(net, world.group(),
                {.units = units_of<torch::nn::LinearImpl>(*net), .share_memory = share});
      Ddp ddp(usual, world.group());
      for (const auto& model : {net, usual}) watch(model->first->bias);  // after attaching, too
      for (int step = 0; step < 2; ++step) {
        fsdp.zero_grad();
        ddp.zero_grad();
        call(net, feature_input(world.rank(), step)).square().mean().backward();
        call(usual, feature_input(world.rank(), step)).square().mean().backward();
        expect_same_gradients(fsdp, usual, 0);
      }
      EXPECT_EQ(seen, 2 * 2 * (60 * 60 + 60));
    });
  }
}

// There is no Join: ranks that have batches are told of those that have none.
TEST(FsdpFeatures, UnequalNumbersOfBatchesAreAnErrorOnAllRanks) {
  static_assert(!std::is_base_of_v<parallel::Joinable, Fsdp>);
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      const Tower net;
      const Fsdp fsdp(net, world.group(),
                      {.units = units_of<BlockImpl>(*net), .share_memory = share});
      EXPECT_THAT(message_of<CommError>([&] {
                    for (int step = 0; step < 2 + world.rank(); ++step) {
                      tower_loss(net, world.rank(), step).backward();
                    }
                    world.group().barrier().wait();
                  }),
                  HasSubstr("Fsdp"));
    });
  }
}

TEST(FsdpFeatures, WhatLooksAtWholeParametersIsRefusedByName) {
  spawn(2, [](World& world) {
    const Group& group = world.group();
    const Tower net;
    Fsdp fsdp(net, group, {.units = units_of<BlockImpl>(*net)});
    torch::optim::SGD sgd(fsdp.parameters(), 0.1);
    const char* divided = "is sharded over the ranks and has no memory";
    Averager averager(*net, {{.group = group, .period = 1}});
    EXPECT_THAT(message_of<c10::Error>([&] { averager.step(); }), HasSubstr(divided));
    EXPECT_THAT(message_of<c10::Error>([&] { parallel::check_same(*net, group); }),
                HasSubstr(divided));
    torch::serialize::OutputArchive archive;
    net->save(archive);
    EXPECT_THAT(message_of<c10::Error>([&] { archive.save_to("/dev/null"); }), HasSubstr(divided));
    EXPECT_THAT(message_of<ConfigError>([&] {
                  ZeroOptimizer(fsdp.parameters(), group,
                                zero<FusedAdamW>(torch::optim::AdamWOptions(0.01)));
                }),
                HasSubstr("is an Fsdp's part of one"));
    EXPECT_THAT(message_of<ConfigError>([&] { parallel::broadcast_optimizer(sgd, group); }),
                HasSubstr("an Fsdp's shards differs from rank to rank"));
  });
}

// Each rank would find another norm, or an overflow that the others do not, and train on.
TEST(FsdpFeatures, WhatLooksAtThePartsOfOneRankIsRefusedByName) {
  spawn(4, [](World& world) {
    const Group& group = world.group();
    const auto divided = [&](int among, const auto& check) {
      const Tower net;
      Fsdp fsdp(net, group, {.units = units_of<BlockImpl>(*net), .shard_ranks = among});
      tower_loss(net, world.rank(), 0).backward();
      check(fsdp.parameters());
    };
    const std::string own_norm =
        "so this would not be the norm of all gradients: call fsdp.clip_grad_norm_()";
    const std::string own_overflow = "the others would step: GradScaler scaler(world)";
    for (const int among : {2, 4}) {
      divided(among, [&](const std::vector<at::Tensor>& shards) {
        const auto before = shards.back().grad().clone();
        EXPECT_THAT(message_of<ConfigError>([&] { parallel::clip_grad_norm_(shards, 1e-9); }),
                    AllOf(HasSubstr("is an Fsdp's part of one"), HasSubstr(own_norm)));
        EXPECT_TRUE(at::equal(before, shards.back().grad()));
        torch::optim::SGD sgd(shards, 0.1);
        GradScaler alone;
        const at::Tensor loss = alone.scale(at::ones({}));
        EXPECT_THAT(message_of<ConfigError>([&] { alone.step(sgd); }), HasSubstr(own_overflow));
        GradScaler among_all(group);
        among_all.scale(loss);
        EXPECT_TRUE(among_all.step(sgd));
      });
    }
    // Replicas would count twice.
    divided(2, [&](const std::vector<at::Tensor>& shards) {
      EXPECT_THAT(
          message_of<ConfigError>([&] { parallel::clip_grad_norm_(shards, 1, {.group = group}); }),
          HasSubstr("sharded over 2 ranks, and ClipOptions::group has 4"));
    });
    // As many ranks, but those that have the same part.
    const Group replicas = group.split(world.rank() % 2), sharers = group.split(world.rank() / 2);
    const std::string others =
        world.rank() % 2 == 0 ? "has ranks [0, 2] of the world" : "has ranks [1, 3] of the world";
    divided(2, [&](const std::vector<at::Tensor>& shards) {
      EXPECT_THAT(message_of<ConfigError>(
                      [&] { parallel::clip_grad_norm_(shards, 1, {.group = replicas}); }),
                  AllOf(HasSubstr("sharded over 2 ranks"), HasSubstr(others)));
      EXPECT_GT(parallel::clip_grad_norm_(shards, 1, {.group = sharers}).item<double>(), 0);
      torch::optim::SGD sgd(shards, 0.1);
      GradScaler wrong(replicas);
      wrong.scale(at::ones({}));
      EXPECT_THAT(message_of<ConfigError>([&] { wrong.step(sgd); }),
                  AllOf(HasSubstr(others), HasSubstr(own_overflow)));
      GradScaler right(sharers);
      right.scale(at::ones({}));
      EXPECT_TRUE(right.step(sgd));
    });
    // What is not divided has its norm on each rank.
    divided(1, [&](const std::vector<at::Tensor>& shards) {
      EXPECT_GT(parallel::clip_grad_norm_(shards, 1).item<double>(), 0);
    });
  });
}

// As when averaged weights are evaluated, and taken back.
TEST(FsdpFeatures, WhatIsWrittenToShardsAfterAnEvaluationIsWhatTheNextForwardSees) {
  for (const bool share : {true, false}) {
    for (const bool by_data : {false, true}) {
      spawn(2, [share, by_data](World& world) {
        Tower net, usual;
        Fsdp fsdp(net, world.group(),
                  {.units = units_of<BlockImpl>(*net),
                   .share_memory = share,
                   .param_dtype = at::kBFloat16});
        const at::Tensor x = tower_input(0);
        const auto wanted = [&] {
          const at::NoGradGuard no_grad;
          return usual->forward(x);
        };
        usual->to(at::kBFloat16);
        const auto shrink = [&] {
          const at::NoGradGuard no_grad;
          for (auto& shard : fsdp.parameters()) (by_data ? shard.data() : shard).mul_(0.5);
          for (auto& parameter : usual->parameters()) parameter.mul_(0.5);
        };
        for (int change = 0; change < 2; ++change) {
          shrink();
          const at::NoGradGuard no_grad;
          EXPECT_TRUE(at::equal(call(net, x), wanted())) << change;
        }
        shrink();
        EXPECT_TRUE(at::equal(call(net, x).detach(), wanted()));
      });
    }
  }
}

TEST(FsdpFeatures, AShardThatTheModuleWouldNotSeeIsRefusedByName) {
  spawn(2, [](World& world) {
    const Tower net;
    Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net)});
    at::Tensor shard = fsdp.parameters().front();
    const auto refused = [&](const char* why) {
      EXPECT_THAT(message_of<ConfigError>([&] { tower_loss(net, world.rank(), 0); }),
                  AllOf(HasSubstr("the shard of parameter '"), HasSubstr(why)));
    };
    shard.requires_grad_(false);
    refused("was frozen: freeze the module's parameter itself");
    shard.requires_grad_(true);
    tower_loss(net, world.rank(), 0).backward();
    shard.set_data(shard.detach().clone());
    refused("was given other memory, which the module does not see");
  });
}

// Whoever forgets reshard() would train on with the weights of that moment.
TEST(FsdpFeatures, ABackwardEndsUnshard) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      const Tower net, usual;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      Ddp ddp(usual, world.group());
      torch::optim::SGD divided(fsdp.parameters(), 0.1), whole(usual->parameters(), 0.1);
      fsdp.unshard();
      for (int step = 0; step < 3; ++step) {
        fsdp.zero_grad();
        ddp.zero_grad();
        tower_loss(net, world.rank(), step).backward();
        tower_loss(usual, world.rank(), step).backward();
        EXPECT_THAT(message_of<c10::Error>([&] { net->head->weight.sum(); }),
                    HasSubstr("has no memory"));
        divided.step();
        whole.step();
      }
      fsdp.reshard();
      expect_same_parameters(fsdp, net, usual);
    });
  }
}

// As in one process: autograd refuses a graph that has saved what is no longer there, and no other.
TEST(FsdpFeatures, AGraphFromBeforeAStepCannotRunBackwardUnlessTheStepLeftItsParametersAlone) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      const Tower net, usual;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      const auto shards = fsdp.parameters();
      FusedAdam all(shards), last({shards.back()});
      const auto loss = [&](int step) { return tower_loss(net, world.rank(), step); };
      const at::Tensor before = loss(0), after = loss(1);
      after.backward();
      all.step();
      EXPECT_THAT(message_of([&] { before.backward(); }),
                  HasSubstr("modified by an inplace operation"));
      fsdp.zero_grad();
      // The bias of the head, which no graph saves.
      const at::Tensor one = loss(2), other = loss(3);
      one.backward();
      last.step();
      const at::Tensor third = loss(4);
      other.backward();
      third.backward();
    });
  }
}

TEST(FsdpFeatures, AStepBetweenUnshardAndTheNextForwardCounts) {
  for (const bool share : {true, false}) {
    spawn(2, [share](World& world) {
      const Tower net, usual;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      Ddp ddp(usual, world.group());
      FusedAdam divided(fsdp.parameters()), whole(usual->parameters());
      for (int step = 0; step < 3; ++step) {
        fsdp.zero_grad();
        ddp.zero_grad();
        tower_loss(net, world.rank(), step).backward();
        tower_loss(usual, world.rank(), step).backward();
        fsdp.unshard();  // to look at the parameters
        divided.step();
        whole.step();
      }
      expect_same_parameters(fsdp, net, usual);
    });
  }
}

}  // namespace
}  // namespace lockstep::test

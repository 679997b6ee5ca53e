// What is wrong on one rank only is an error on all of them, and what one rank may do alone is not.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/fsdp.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// All ranks throw, and the group lives on.
template <typename Attach, typename Matcher>
void expect_all_refuse(Attach attach, Matcher message) {
  spawn(3, [&](World& world) {
    Mlp net;
    if (world.rank() != 1) net.register_parameter("extra", torch::ones({2}));
    try {
      attach(net, world);
      FAIL() << "rank " << world.rank() << " accepted it";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), message);
    }
    Mlp good;
    const Ddp ddp(good, world);
  });
}

TEST(OneRank, AnIgnoredNameThatOneRankLacks) {
  expect_all_refuse(
      [](Mlp& net, World& world) { Ddp(net, world, {.ignore = {"extra"}}); },
      StartsWith("[ddp] rank 1: DdpOptions::ignore names 'extra', but the module has no "
                 "such parameter or buffer"));
}

TEST(OneRank, ASparseNameThatOneRankLacks) {
  expect_all_refuse(
      [](Mlp& net, World& world) { Ddp(net, world, {.sparse = {"extra"}}); },
      StartsWith("[ddp] rank 1: DdpOptions::sparse names 'extra', but the module has no "
                 "such parameter;"));
}

TEST(OneRank, AnIgnoredNameOfFsdp) {
  expect_all_refuse(
      [](Mlp& net, World& world) { parallel::Fsdp(net, world, {.ignore = {"extra"}}); },
      AllOf(StartsWith("[fsdp] rank 1: FsdpOptions::ignore names 'extra'"), Not(HasSubstr("Ddp"))));
}

TEST(OneRank, OtherModelsForFsdp) {
  expect_all_refuse([](Mlp& net, World& world) { const parallel::Fsdp fsdp(net, world); },
                    AllOf(StartsWith("[fsdp] the ranks' models differ"), Not(HasSubstr("Ddp"))));
}

// refresh() after one rank has lost what the options name.
TEST(OneRank, RefreshWithoutAnIgnoredParameter) {
  struct Host : torch::nn::Module {
    Host() {
      net = register_module("net", std::make_shared<Mlp>());
      more = register_module("more", torch::nn::Linear(2, 2));
    }
    void lose() { unregister_module("more"); }
    std::shared_ptr<Mlp> net;
    torch::nn::Linear more{nullptr};
  };
  spawn(2, [](World& world) {
    Host host;
    Ddp ddp(host, world, {.ignore = {"more.weight", "more.bias"}});
    if (world.rank() == 1) host.lose();
    try {
      ddp.refresh();
      ADD_FAILURE() << "rank " << world.rank();
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1: DdpOptions::ignore names 'more.weight'"));
    }
    // Rank 0 stays attached as before.
    world.group().barrier().wait();
  });
}

TEST(OneRank, OtherOptions) {
  const std::vector<std::pair<std::function<void(DdpOptions&)>, std::string>> changes{
      {[](DdpOptions& o) {
         o.bucket_bytes = {64, 128};
       },
       "bucket_bytes {64, 128}"},
      {[](DdpOptions& o) { o.unused = Unused::Error; }, "unused Error"},
      {[](DdpOptions& o) { o.buffers = Buffers::None; }, "buffers None"},
      {[](DdpOptions& o) { o.reduce_dtype = at::kDouble; }, "hook cast to float64"},
      {[](DdpOptions& o) { o.check_same_every = 3; }, "check_same_every 3"},
      {[](DdpOptions& o) { o.lanes = 4; }, "with lanes"},
  };
  spawn(2, [&](World& world) {
    for (const auto& [change, text] : changes) {
      Mlp net;
      DdpOptions options;
      if (world.rank() == 1) change(options);
      try {
        const Ddp ddp(net, world, options);
        ADD_FAILURE() << text;
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), AllOf(StartsWith("[ddp] the ranks' options differ"),
                                        HasSubstr("rank 1 has "), HasSubstr(text)));
      }
    }
  });
}

// Rank 0 looks at gradients of its own, which it then drops.
TEST(OneRank, ZeroGradAroundALookAtOwnGradients) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    const auto look = [&](int step) {
      ddp.zero_grad();
      {
        const auto hold = ddp.hold();
        square_loss(net, 0, step).backward();
      }
      EXPECT_TRUE(net.first->weight.grad().defined());
      ddp.zero_grad();
    };
    for (int step = 0; step < 6; ++step) {
      if (step == 2 && world.rank() == 0) look(step);
      ddp.zero_grad();
      if (step == 3 && world.rank() == 0) look(step);  // also within a step
      square_loss(net, world.rank(), step).backward();
      if (step == 4 && world.rank() == 0) look(step);
    }
  });
}

// In a loop that accumulates, gradients that are dropped are those of a step that was left out.
TEST(OneRank, AStepOfMicroBatchesThatIsLeftOutIsTold) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      {
        const auto hold = ddp.hold();
        square_loss(net, world.rank(), step).backward();
      }
      if (step == 1 && world.rank() == 1) continue;
      const auto loss = square_loss(net, world.rank(), step);
      if (step == 0) {
        loss.backward();
      } else {
        EXPECT_THROW(loss.backward(), CommError);
        return;
      }
    }
  });
}

// All ranks drop what they have under hold() and start the step again, as after an exception. One
// of them never accumulates otherwise.
TEST(OneRank, AStepThatAllStartAgainWhereRanksAccumulateUnequally) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world);
    const auto begin = [&](int step, bool holds) {
      ddp.zero_grad();
      if (!holds) return;
      const auto hold = ddp.hold();
      square_loss(net, world.rank(), step).backward();
    };
    for (int step = 0; step < 4; ++step) {
      if (step == 2) begin(step, /*holds=*/true);
      begin(step, world.rank() == 1);
      square_loss(net, world.rank(), step).backward();
    }
  });
}

// Freezing parameters needs no refresh(), with Unused::Zero and with Unused::Error.
TEST(OneRank, FrozenParametersAreNoError) {
  spawn(2, [](World& world) {
    for (const int64_t lanes : {0, 2}) {
      Mlp net;
      Ddp ddp(net, world, {.unused = Unused::Error, .lanes = lanes});
      torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(0.01));
      const auto run = [&](int step) {
        ddp.zero_grad();
        if (lanes == 0) return square_loss(net, world.rank(), step).backward();
        for (const Lane lane : ddp.lanes(StepKey{.seed = 1, .step = step}))
          square_loss(net, static_cast<int>(lane.index), step).backward();
      };
      run(0);
      optimizer.step();
      for (auto& parameter : net.second->parameters()) parameter.requires_grad_(false);
      const at::Tensor before = net.second->weight.detach().clone();
      for (int step = 1; step < 3; ++step) {
        run(step);
        EXPECT_FALSE(net.second->weight.grad().defined());
        EXPECT_TRUE(net.first->weight.grad().defined());
        optimizer.step();
      }
      EXPECT_TRUE(at::equal(before, net.second->weight));
    }
  });
}

// The rank where it is frozen follows the others.
TEST(OneRank, AParameterThatOneRankFroze) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world, {.unused = Unused::Error});
    if (world.rank() == 1) net.second->bias.requires_grad_(false);
    ddp.zero_grad();
    square_loss(net, world.rank()).backward();
    ASSERT_TRUE(net.second->bias.grad().defined());
    at::Tensor most = net.second->bias.grad().clone();
    world.group().all_reduce(most, ReduceOp::Max).wait();
    EXPECT_TRUE(at::equal(most, net.second->bias.grad()));
    EXPECT_TRUE(most.any().item<bool>());
  });
}

}  // namespace
}  // namespace lockstep::test

// Averages of weights over steps: PyTorch's, with the same bits however the model is divided.
#include "lockstep/parallel/weight_average.h"

#include <gmock/gmock.h>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/stateful.h"
#include "parallel/fsdp/models.h"
#include "parallel/python.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::AdamWOptions;

TEST(WeightAverages, AreThoseOfPython) {
  const auto python = python_numbers("weight_average");
  size_t at = 0;
  for (const std::optional<double> decay : {std::optional(0.9), std::optional<double>()}) {
    const at::Tensor weight = at::rand({1, 6});
    WeightAverage average({weight}, {.decay = decay});
    for (int step = 0; step < 12; ++step) {
      weight.copy_(at::cos(at::arange(6) * static_cast<double>(step)).unsqueeze(0));
      average.update();
      for (int i = 0; i < 6; ++i) {
        EXPECT_NEAR(average.averages()[0][0][i].item<double>(), python.at(at++), 1e-6);
      }
    }
    EXPECT_EQ(average.updates(), 12);
  }
  EXPECT_EQ(at, python.size());
}

TEST(WeightAverages, BeginAfterTheStartAndTakeOneOfSeveralSteps) {
  const at::Tensor weight = at::zeros({1});
  WeightAverage average({weight}, {.decay = {}, .start = 2, .every = 3});
  std::vector<float> found;
  for (int step = 1; step <= 9; ++step) {
    weight.fill_(step);
    average.update();
    found.push_back(average.averages()[0].item<float>());
  }
  // 1 and 2 are copied; 3, 6 and 9 are averaged.
  EXPECT_THAT(found, testing::ElementsAre(1, 2, 3, 3, 3, 4.5, 4.5, 4.5, 6));
}

// Each average is of the ones and the weights before, with the decay of its number.
TEST(WeightAverages, FollowADecayThatChangesAlsoAfterRestoring) {
  const Folder folder;
  spawn(1, [&](World& world) {
    const auto options = [](std::vector<int64_t>& asked) {
      return parallel::WeightAverageOptions{
          .start = 1, .every = 2, .decay_of = [&](int64_t before) {
            asked.push_back(before);
            return static_cast<double>(before) / static_cast<double>(before + 1);
          }};
    };
    const at::Tensor weight = at::zeros({1}, at::kDouble);
    std::vector<int64_t> asked, asked_later;
    std::vector<double> found;
    const auto follow = [&](WeightAverage& average, int from, int to) {
      for (int step = from; step <= to; ++step) {
        weight.fill_(step);
        average.update();
        found.push_back(average.averages()[0].item<double>());
      }
    };
    Checkpointer checkpoints(world.group(), folder.path());
    WeightAverage first({weight}, options(asked));
    checkpoints.track("ema", first);
    follow(first, 1, 5);
    checkpoints.save(5);
    Checkpointer later(world.group(), folder.path());
    WeightAverage second({weight}, options(asked_later));
    later.track("ema", second);
    later.restore_latest();
    follow(second, 6, 8);
    // 1 and 2 are copied; with a decay of n / (n + 1) the average of 2, 4, 6 and 8 is their mean.
    EXPECT_THAT(found, testing::Pointwise(testing::DoubleNear(1e-12),
                                          std::vector<double>{1, 2, 2, 3, 3, 4, 4, 5}));
    EXPECT_THAT(asked, testing::ElementsAre(1));
    EXPECT_THAT(asked_later, testing::ElementsAre(2, 3));
  });
}

TEST(WeightAverages, StayAsTheyWereWhereADecayIsNone) {
  const at::Tensor weight = at::ones({1});
  WeightAverage average({weight}, {.decay_of = [](int64_t) { return 1.5; }});
  average.update();
  weight.fill_(3);
  EXPECT_THAT(message_of<ConfigError>([&] { average.update(); }),
              HasSubstr("decay_of(1) = 1.5: a number from 0 to 1"));
  EXPECT_EQ(average.updates(), 1);
  EXPECT_EQ(average.averages()[0].item<float>(), 1);
}

TEST(WeightAverages, OfEveryDtype) {
  const at::Tensor half = at::ones({3}, at::kBFloat16), full = at::ones({3}, at::kDouble),
                   pair = at::ones({3}, at::kComplexFloat), count = at::ones({}, at::kLong);
  WeightAverage average({half, full, pair, count, half}, {.decay = 0.999});
  ASSERT_EQ(average.averages().size(), 5u);
  EXPECT_TRUE(average.averages()[4].is_same(average.averages()[0]));  // a tied one has one
  EXPECT_EQ(average.averages()[0].scalar_type(), at::kFloat);
  average.update();
  for (int step = 0; step < 10; ++step) {
    half.zero_();
    full.zero_();
    pair.zero_();
    count.add_(1);
    average.update();
  }
  const double want = std::pow(0.999, 10);  // which bfloat16 would round to 1
  EXPECT_NEAR(average.averages()[0][0].item<double>(), want, 1e-6);
  EXPECT_NEAR(average.averages()[1][0].item<double>(), want, 1e-12);
  EXPECT_NEAR(at::real(average.averages()[2])[0].item<double>(), want, 1e-6);
  EXPECT_EQ(average.averages()[3].item<int64_t>(), 11);
}

// What a loop of its own computes has the bits of what operators do, wherever the elements lie.
TEST(WeightAverages, HaveTheSameBitsInEveryLayoutAndAfterAConversion) {
  const at::Tensor base = at::randn({17000, 2}, at::kDouble);
  std::vector<at::Tensor> weights;
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const at::Tensor all = base.to(type);
    weights.push_back(all.clone());
    weights.push_back(all.clone().t());
    weights.push_back(all.clone().select(1, 1));
    weights.push_back(all.clone()
                          .narrow(0, 0, 4 * 9 * 25)
                          .view({4, 9, 5, 10})
                          .contiguous(at::MemoryFormat::ChannelsLast));
    weights.push_back(all.narrow(0, 0, 0).clone());
  }
  WeightAverage average(weights, {.decay = 0.9});
  std::vector<at::Tensor> want;
  const auto update = [&](bool begins) {
    average.update();
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor& mine = average.averages()[i];
      if (begins) want.push_back(mine.clone());
      if (!begins) want[i].add_(weights[i].to(mine.scalar_type()).sub(want[i]).mul_(1 - 0.9));
      EXPECT_TRUE(at::equal(mine, want[i])) << i;
    }
  };
  update(true);
  for (const auto other : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (auto& weight : weights) {
      weight.mul_(1.01);
    }
    update(false);
    // As Module::to() does.
    for (auto& weight : weights) weight.set_data(weight.to(other));
    update(false);
  }
}

// A graph that was made with an average does not find another in its place.
TEST(WeightAverages, CountTheirVersions) {
  const at::Tensor weight = at::ones({4}), x = torch::ones({4}, torch::requires_grad());
  WeightAverage average({weight});
  average.update();
  const at::Tensor loss = (x * average.averages()[0]).sum();
  average.update();
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(WeightAverages, AreAppliedForAWhile) {
  torch::nn::Linear net(4, 3);
  WeightAverage average(net->parameters(), {.decay = 0.5});
  average.update();
  const at::Tensor first = net->weight.detach().clone();
  {
    const at::NoGradGuard no_grad;
    net->weight.add_(1);
  }
  average.update();
  const at::Tensor raw = net->weight.detach().clone();
  {
    const auto applied = average.apply();
    EXPECT_TRUE(average.is_applied());
    EXPECT_TRUE(at::allclose(net->weight, first + 0.5));
    EXPECT_THAT(message_of<ConfigError>([&] { average.update(); }),
                HasSubstr("update() while the average is applied"));
    EXPECT_THAT(message_of<ConfigError>([&] { (void)average.apply(); }),
                HasSubstr("apply() while the average is applied"));
    const at::NoGradGuard no_grad;
    net->weight.zero_();  // lost
  }
  EXPECT_FALSE(average.is_applied());
  EXPECT_TRUE(at::equal(net->weight, raw));
  average.update();
}

// Ranks apply them one after the other, and give them back in the same order.
TEST(WeightAverages, AreAppliedByEachRankWhereAllHaveOneMemory) {
  spawn(2, [](World& world) {
    Tower net;
    const Ddp ddp(net, world.group());
    ZeroOptimizer sgd(net->parameters(), world.group(),
                      zero<torch::optim::SGD>(torch::optim::SGDOptions(0.1)),
                      {.share_parameters = true});
    ASSERT_TRUE(sgd.shares_parameters());
    WeightAverage average(net->parameters(), {.decay = 0.5});
    const auto step = [&](int number) {
      sgd.zero_grad();
      tower_loss(net, world.rank(), number).backward();
      sgd.step();
      average.update();
    };
    const auto equal = [&](const std::vector<at::Tensor>& want) {
      return std::ranges::equal(net->parameters(), want, &at::equal);
    };
    const auto in_turns = [&](const auto& act) {
      for (int rank = 0; rank < 2; ++rank) {
        if (world.rank() == rank) act();
        world.group().barrier().wait();
      }
    };
    for (int number = 0; number < 3; ++number) {
      step(number);
      std::vector<at::Tensor> before;
      for (const auto& weight : net->parameters()) before.push_back(weight.detach().clone());
      EXPECT_EQ(equal(average.averages()), number == 0);
      std::optional<WeightAverage::Applied> applied;
      in_turns([&] { applied.emplace(average.apply()); });
      EXPECT_TRUE(equal(average.averages()));
      in_turns([&] {
        EXPECT_TRUE(equal(average.averages()));
        applied.reset();
      });
      EXPECT_TRUE(equal(before));
      EXPECT_TRUE(sgd.shares_parameters());
    }
  });
}

TEST(WeightAverages, RefuseWhatTheyCannotAverage) {
  const at::Tensor weight = at::zeros({4});
  for (const double decay : {-0.1, 1.1, std::nan("")}) {
    EXPECT_THAT(message_of<ConfigError>([&] { WeightAverage({weight}, {.decay = decay}); }),
                HasSubstr("a number from 0 to 1"));
  }
  EXPECT_THAT(message_of<ConfigError>([&] { WeightAverage({weight}, {.every = 0}); }),
              HasSubstr("start = 0, every = 0: 0 or more, and 1 or more"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                WeightAverage({weight, {}}, {});
              }),
              HasSubstr("weight 1 is undefined"));
  WeightAverage average({weight});
  weight.set_data(at::zeros({5}));
  EXPECT_THAT(message_of<ConfigError>([&] { average.update(); }),
              AllOf(HasSubstr("weight 0 had 4 elements on cpu and has 5 on cpu")));
}

// Every rank has the same batch, so that the number of ranks changes no bit of the gradients.
template <class Optimizer>
void averaged_steps(Tower& net, Optimizer& optimizer, WeightAverage& average, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    tower_loss(net, 0, step).backward();
    optimizer.step();
    average.update();
  }
}

at::Tensor scores_of(Tower& net) {
  const at::NoGradGuard no_grad;
  return call(net, tower_input(0, 99)).clone();
}

// A model as one process has it after some steps.
struct UsualAverage {
  explicit UsualAverage(int steps) { averaged_steps(net, adam, average, 0, steps); }
  Tower net;
  FusedAdamW adam{net->parameters(), AdamWOptions(0.01)};
  WeightAverage average{net->parameters(), {.decay = 0.8}};
};

TEST(WeightAverages, OfADividedModelAreItsPartsOfTheWholeOnes) {
  for (const bool share : {true, false}) {
    spawn(2, [&](World& world) {
      UsualAverage usual(4);
      Tower net;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      FusedAdamW adam(fsdp.parameters(), AdamWOptions(0.01));
      WeightAverage average(fsdp.parameters(), {.decay = 0.8});
      averaged_steps(net, adam, average, 0, 3);
      at::Tensor found;
      for (int step = 3; step < 5; ++step) {  // training goes on after an evaluation
        averaged_steps(net, adam, average, step, step + 1);
        if (step == 3) {
          const auto applied = average.apply();
          found = scores_of(net);
        }
      }
      {
        const auto applied = usual.average.apply();
        EXPECT_TRUE(at::equal(found, scores_of(usual.net)));
      }
      averaged_steps(usual.net, usual.adam, usual.average, 4, 5);
      expect_same_parameters(fsdp, net, usual.net);
      const auto shards = fsdp.shards();
      const auto names = usual.net->named_parameters().keys();
      for (size_t i = 0; i < shards.size(); ++i) {
        ASSERT_EQ(shards[i].name, names[i]);
        EXPECT_TRUE(at::equal(average.averages()[i],
                              part_of_shard(usual.average.averages()[i], shards[i])));
      }
    });
  }
}

// Read then, they would be averages of this rank's part alone.
TEST(WeightAverages, AreNotAppliedToAnFsdpsShardsWhileParametersAreWhole) {
  for (const bool share : {true, false}) {
    spawn(2, [&](World& world) {
      Tower net;
      Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net), .share_memory = share});
      FusedAdamW adam(fsdp.parameters(), AdamWOptions(0.01));
      WeightAverage average(fsdp.parameters(), {.decay = 0.8});
      averaged_steps(net, adam, average, 0, 3);
      const auto read = [&] {
        std::vector<at::Tensor> all;
        for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().clone());
        return all;
      };
      fsdp.unshard();
      const auto trained = read();
      EXPECT_THAT(message_of<ConfigError>([&] { (void)average.apply(); }),
                  HasSubstr("apply() between an Fsdp's unshard() and reshard()"));
      fsdp.reshard();
      {
        const auto applied = average.apply();
        fsdp.unshard();
        EXPECT_FALSE(at::equal(read().front(), trained.front()));
        fsdp.reshard();
      }
      fsdp.unshard();
      averaged_steps(net, adam, average, 3, 4);  // which ends it
      const auto applied = average.apply();
    });
  }
}

// Saves after two steps, or restores and makes two more: with an Fsdp, or whole.
void save_or_restore(World& world, bool is_divided, const std::string& folder, bool restores) {
  UsualAverage usual(restores ? 4 : 2);
  Tower net(restores ? 9 : 0);
  Checkpointer checkpoints(world.group(), folder);
  const auto go = [&](auto& model, auto& adam, WeightAverage& average) {
    checkpoints.track("net", model);
    checkpoints.track("adam", adam);
    checkpoints.track("ema", average);
    if (restores) {
      checkpoints.restore_latest();
      EXPECT_EQ(average.updates(), 2);
      averaged_steps(net, adam, average, 2, 4);
      return;
    }
    averaged_steps(net, adam, average, 0, 2);
    checkpoints.save(2);
    const auto applied = average.apply();
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.save(3); }),
                HasSubstr("save() while the average is applied"));
  };
  const auto& wanted = usual.average.averages();
  if (is_divided) {
    Fsdp fsdp(net, world.group(), {.units = units_of<BlockImpl>(*net)});
    FusedAdamW adam(fsdp.parameters(), AdamWOptions(0.01));
    WeightAverage average(fsdp.parameters(), {.decay = 0.8});
    go(fsdp, adam, average);
    const auto shards = fsdp.shards();
    for (size_t i = 0; i < shards.size(); ++i) {
      EXPECT_TRUE(at::equal(average.averages()[i], part_of_shard(wanted[i], shards[i])));
    }
    return;
  }
  Ddp ddp(net, world.group());
  FusedAdamW adam(net->parameters(), AdamWOptions(0.01));
  WeightAverage average(net->parameters(), {.decay = 0.8});
  go(net, adam, average);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(at::equal(average.averages()[i], wanted[i]));
  }
}

TEST(WeightAverages, AreRestoredOnOtherRanksWithAndWithoutFsdp) {
  struct Change {
    bool saved_divided;
    int saved_ranks;
    bool divided;
    int ranks;
  };
  for (const Change change : {Change{true, 2, false, 1}, {false, 1, true, 4}, {true, 4, true, 2}}) {
    const Folder folder;
    spawn(change.saved_ranks, [&](World& world) {
      save_or_restore(world, change.saved_divided, folder.path(), false);
    });
    spawn(change.ranks,
          [&](World& world) { save_or_restore(world, change.divided, folder.path(), true); });
  }
}

TEST(WeightAverages, BeginAnewWhereACheckpointHasNone) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Tower net;
    Ddp ddp(net, world.group());
    {
      Checkpointer checkpoints(world.group(), folder.path());
      checkpoints.track("net", net);
      checkpoints.save(1);
    }
    Tower other(7);
    WeightAverage average(other->parameters());
    average.update();
    Checkpointer checkpoints(world.group(), folder.path());
    checkpoints.track("net", other);
    checkpoints.track("ema", average);
    EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                HasSubstr("ema/net/words.weight is missing"));
    checkpoints.restore_latest({.allow_missing = {"ema/*"}});
    EXPECT_EQ(average.updates(), 1);  // as it was
    average.restart();
    EXPECT_EQ(average.updates(), 0);
    EXPECT_TRUE(at::equal(average.averages()[0], net->parameters()[0]));
  });
}

}  // namespace
}  // namespace lockstep::test

#include "lockstep/train/metrics.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/interchange.h"
#include "lockstep/core/error.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;
using train::make_metric;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A metric, and how it is given rows [begin, end) of the inputs.
struct Case {
  std::string name;
  std::string output, target, weight;
};

const std::vector<Case> kCases{
    {"accuracy", "logits", "classes", "weights"},
    {"top_k", "logits", "classes", "weights"},
    {"confusion_matrix", "logits", "classes", "weights"},
    {"auc", "scores", "binary", "fractions"},
    {"perplexity", "logits", "classes", "fractions"},
    {"mse", "predicted", "wanted", "fractions"},
    {"mean", "fractions", "", "fractions"},
};

using Tensors = std::map<std::string, at::Tensor>;

void count(Metric& metric, const Case& of, const Tensors& inputs, bool weighted, int64_t begin,
           int64_t end) {
  const auto rows = [&](const std::string& name) {
    return name.empty() ? at::Tensor() : inputs.at(name).slice(0, begin, end);
  };
  metric.update(rows(of.output), rows(of.target), weighted ? rows(of.weight) : at::Tensor());
}

TEST(Metrics, AreThoseOfScikitLearn) {
  isolated([] {
    const Folder folder;
    ASSERT_EQ(std::system(fmt::format("{} {}/tests/metrics/metrics_peer.py {}",
                                      LOCKSTEP_PEERS_PYTHON, LOCKSTEP_SOURCE_DIR, folder.path())
                              .c_str()),
              0)
        << "needs scikit-learn: make bench-setup";
    const Tensors inputs = read_tensors(folder / "inputs.safetensors");
    std::ifstream file(folder / "values.json");
    const auto expected = nlohmann::json::parse(file);
    for (const bool weighted : {false, true}) {
      int compared = 0;
      for (const Case& of : kCases) {
        const auto metric = make_metric(of.name, {.top_k = 3});
        for (int64_t begin = 0; begin < 997; begin += 100) {
          count(*metric, of, inputs, weighted, begin, std::min<int64_t>(begin + 100, 997));
        }
        for (const auto& [name, value] : metric->values()) {
          const auto& theirs = expected[weighted ? "weighted" : "plain"];
          if (!theirs.contains(name)) continue;
          const auto other = theirs[name].get<double>();
          // R2 of targets near a million: theirs loses ten digits.
          EXPECT_NEAR(value, other, name == "r2" ? 1e-9 : 1e-12 * std::abs(other)) << name;
          ++compared;
        }
      }
      EXPECT_EQ(compared, 13);  // accuracy twice
    }
    ConfusionMatrix matrix;
    matrix.update(inputs.at("logits"), inputs.at("classes"));
    for (int64_t i = 0; i < 7; ++i) {
      for (int64_t j = 0; j < 7; ++j) {
        EXPECT_EQ(matrix.matrix()[i][j].item<int64_t>(), expected["matrix"][i][j].get<int64_t>());
      }
    }
    EXPECT_EQ(matrix.by_class().support.sum().item<double>(), 997);
  });
}

Tensors random_inputs() {
  torch::manual_seed(11);
  Tensors inputs;
  inputs["logits"] = torch::randn({101, 5});
  inputs["classes"] = torch::randint(5, {101});
  inputs["scores"] = torch::randn({101}).round();
  inputs["binary"] = torch::randint(2, {101});
  inputs["weights"] = torch::randint(1, 4, {101});
  inputs["fractions"] = torch::rand({101});
  inputs["wanted"] = 1000 * torch::randn({101, 2});
  inputs["predicted"] = inputs["wanted"] + torch::randn({101, 2});
  return inputs;
}

// All values of all metrics over these ranks' shares, as hexadecimal texts.
std::string all_values(const Group& group, int64_t batch, bool weighted, bool last_has_none) {
  const Tensors inputs = random_inputs();
  const int64_t parts = group.size() - (last_has_none ? 1 : 0);
  std::string text;
  for (const Case& of : kCases) {
    const auto metric = make_metric(of.name);
    // Dealt out as a sampler does, so that orders differ.
    for (int64_t begin = group.rank() * batch; begin < 101 && group.rank() < parts;
         begin += parts * batch) {
      count(*metric, of, inputs, weighted, begin, std::min<int64_t>(begin + batch, 101));
    }
    for (const auto& [name, value] : metric->values(group)) {
      text += fmt::format("{} {:a}\n", name, value);
    }
  }
  return text;
}

TEST(Metrics, AreTheSameBitsOnAnyNumberOfRanks) {
  const Folder folder;
  const std::vector<Ranks> worlds{{"shm", 1}, {"shm", 2},  {"shm", 3},
                                  {"tcp", 2}, {"gloo", 2}, {"host-then-net", 4, {0, 0, 1, 1}}};
  for (const Ranks& ranks : worlds) {
    spawn(ranks, [&](World& world) {
      std::string text;
      for (const bool weighted : {false, true}) {
        text += all_values(world.group(), 7 + ranks.count, weighted, false);
        if (ranks.count > 1) {
          EXPECT_EQ(all_values(world.group(), 5, weighted, true),
                    all_values(world.group(), 9, weighted, false));
        }
      }
      write(folder / fmt::format("{}-{}", ranks.name(), world.rank()), text);
    });
    for (int rank = 0; rank < ranks.count; ++rank) {
      EXPECT_EQ(contents(folder / fmt::format("{}-{}", ranks.name(), rank)),
                contents(folder / "shm1-0"))
          << ranks.name();
    }
  }
}

TEST(Metrics, TakeTheShapesOfLosses) {
  isolated([] {
    const auto logits = torch::randn({4, 3, 6}), targets = torch::randint(3, {4, 6});
    Accuracy first, last, flat;
    first.update(logits, targets);
    last.update(logits.movedim(1, 2), targets);
    flat.update(logits.movedim(1, 2).reshape({24, 3}), targets.flatten());
    EXPECT_EQ(first.compute(), flat.compute());
    EXPECT_EQ(last.compute(), flat.compute());
    Accuracy half;
    half.update(logits.to(at::kBFloat16), targets);
    EXPECT_NO_THROW(half.compute());

    Accuracy two({.threshold = 0.5});
    two.update(torch::tensor({{0.6}, {0.5}, {0.1}}), torch::tensor({1.0, 1.0, 0.0}));
    EXPECT_EQ(two.compute(), 2.0 / 3);

    Accuracy ties;  // the lower class counts as the larger
    ties.update(torch::zeros({2, 3}), torch::tensor({0, 2}));
    EXPECT_EQ(ties.compute(), 0.5);

    Perplexity tokens;
    tokens.update(torch::zeros({1, 2, 8}), torch::tensor({{3, -100}}));  // one is padding
    EXPECT_NEAR(tokens.compute(), 8, 1e-12);
    tokens.update(kNan, 0);  // of a batch whose targets are all padding
    EXPECT_NEAR(tokens.compute(), 8, 1e-12);

    Auc pairs;
    pairs.update(torch::tensor({{2.0, 1.0}, {0.0, 1.0}, {0.0, 0.0}}), torch::tensor({0, 1, 1}));
    EXPECT_EQ(pairs.compute(), 1);

    Mean mean("loss");
    mean.update(0.5, 64);
    mean.update(1.5, 32);
    mean.update(torch::tensor({1.0, 2.0}));
    EXPECT_EQ(mean.values().at("loss"), (32 + 48 + 3) / 98.0);
    mean.reset();
    mean.update(3);
    EXPECT_EQ(mean.compute(), 3);
  });
}

TEST(Metrics, OfRegressionAtTheEdges) {
  isolated([] {
    const auto r2 = [](const at::Tensor& outputs, const at::Tensor& targets) {
      Regression score(train::RegressionScore::R2);
      score.update(outputs, targets);
      return score.compute();
    };
    const auto constant = torch::full({3}, 2.0);
    EXPECT_EQ(r2(constant, constant), 1);
    EXPECT_EQ(r2(constant + 1, constant), 0);
    EXPECT_TRUE(std::isnan(r2(torch::ones({1}), torch::ones({1}))));
    EXPECT_EQ(r2(torch::tensor({{1.0}, {3.0}}), torch::tensor({1.0, 3.0})), 1);
  });
}

TEST(Metrics, NameWhatTheyCannotCount) {
  isolated([] {
    const auto fault = [](Metric& metric) {
      return message_of<DataError>([&] { metric.compute(); });
    };
    Accuracy accuracy;
    EXPECT_THAT(fault(accuracy), HasSubstr("[accuracy] there is nothing to compute"));
    accuracy.update(torch::zeros({2, 3}), torch::zeros({2}, at::kLong));
    accuracy.update(torch::tensor({{0.0, 1.0}, {0.0, kNan}}), torch::tensor({0, 1}));
    EXPECT_THAT(fault(accuracy),
                HasSubstr("[accuracy] rank 0, sample 1 of batch 1: the output for class 1 is NaN"));
    accuracy.reset();
    accuracy.update(torch::zeros({1, 3}), torch::tensor({3}));
    EXPECT_THAT(fault(accuracy), HasSubstr("target 3 is none of the classes 0 to 2"));
    accuracy.reset();
    accuracy.update(torch::zeros({1, 3}), torch::tensor({-100}));
    EXPECT_THAT(fault(accuracy), HasSubstr("no sample counts"));
    Auc auc;
    auc.update(torch::tensor({0.1, 0.2}), torch::tensor({1, 1}));
    EXPECT_THAT(fault(auc), HasSubstr("needs samples of both classes"));
    auc.update(torch::tensor({0.1}), torch::tensor({2}));
    EXPECT_THAT(fault(auc), HasSubstr("target 2 is neither 0 nor 1"));
    Regression regression;
    regression.update(torch::tensor({1.0, kNan}), torch::tensor({1.0, 1.0}));
    EXPECT_THAT(fault(regression), HasSubstr("sample 1 of batch 0: column 0: target 1 and error"));
    Mean mean;
    mean.update(kNan);
    EXPECT_THAT(fault(mean), HasSubstr("nan, with weight 1, is not finite"));
    Perplexity perplexity;
    perplexity.update(torch::tensor({{0.0, -std::numeric_limits<double>::infinity()}}),
                      torch::tensor({1}));
    EXPECT_THAT(fault(perplexity), HasSubstr("the cross-entropy of target 1 is inf"));
    perplexity.reset();
    perplexity.update(kNan, 0);
    EXPECT_THAT(fault(perplexity), HasSubstr("no target counts"));
  });
}

TEST(Metrics, RefuseShapesThatDoNotFit) {
  isolated([] {
    const auto refused = [](Metric& metric, const at::Tensor& outputs, const at::Tensor& targets,
                            const at::Tensor& weights = {}) {
      return message_of<ConfigError>([&] { metric.update(outputs, targets, weights); });
    };
    Accuracy accuracy;
    EXPECT_THAT(refused(accuracy, torch::zeros({3, 2}), torch::zeros({4})),
                HasSubstr("[accuracy] outputs [3, 2] and targets [4]"));
    EXPECT_THAT(refused(accuracy, torch::zeros({3, 4, 4}), torch::zeros({3, 4})),
                HasSubstr("classes may be dimension 1 or the last"));
    EXPECT_THAT(refused(accuracy, torch::zeros({2, 2}), torch::tensor({0.5, 1.0})),
                HasSubstr("fractions, not class numbers"));
    EXPECT_THAT(refused(accuracy, torch::zeros({2, 2}), torch::zeros({2}), torch::ones({3})),
                HasSubstr("weights [3] do not fit samples [2]"));
    EXPECT_THAT(
        refused(accuracy, torch::zeros({2, 2}), torch::zeros({2}), torch::tensor({1.0, -1.0})),
        HasSubstr("not negative"));
    ConfusionMatrix matrix({.classes = 3});
    EXPECT_THAT(refused(matrix, torch::zeros({2, 2}), torch::zeros({2})),
                HasSubstr("outputs are for 2 classes, not for 3"));
    EXPECT_THAT(refused(matrix, torch::zeros({1, 3}), torch::zeros({1}), torch::tensor({0.5})),
                HasSubstr("whole numbers"));
    Regression regression;
    EXPECT_THAT(refused(regression, torch::zeros({2, 2}), torch::zeros({2, 1})),
                HasSubstr("differ in shape"));
    EXPECT_THAT(message_of<ConfigError>([] { Perplexity().update(1, -1); }),
                HasSubstr("[perplexity] a mean cross-entropy of -1 targets"));
    EXPECT_THAT(message_of<ConfigError>([] { make_metric("acuracy"); }),
                HasSubstr("did you mean 'accuracy'?"));
  });
}

TEST(Metrics, FaultsAreErrorsOnAllRanks) {
  spawn(2, [](World& world) {
    Accuracy accuracy;
    if (world.rank() == 1) {
      accuracy.update(torch::tensor({{kNan, 0.0}}), torch::tensor({0}));
    }
    EXPECT_THAT(message_of<DataError>([&] { accuracy.compute(world); }),
                HasSubstr("rank 1, sample 0 of batch 0: the output for class 0 is NaN"));
    ConfusionMatrix matrix;
    matrix.update(torch::zeros({1, 2 + world.rank()}), torch::zeros({1}));
    EXPECT_THAT(message_of<ConfigError>([&] { matrix.compute(world); }),
                HasSubstr("rank 1 has counted 9 numbers where others have counted 4"));
    accuracy.reset();
    EXPECT_THAT(message_of<DataError>([&] { accuracy.compute(world); }),
                HasSubstr("no rank has had a sample"));
  });
}

// Saved in the middle of an epoch, resumed on another number of ranks.
TEST(Metrics, GoOnFromACheckpoint) {
  const Folder folder;
  const auto run = [&](int ranks, const std::function<void(World&, std::vector<Metric*>)>& body) {
    spawn(ranks, [&](World& world) {
      Checkpointer checkpoints(world.group(), folder / "saved");
      std::vector<std::unique_ptr<Metric>> metrics;
      std::vector<Metric*> all;
      for (const char* name : {"accuracy", "auc"}) {
        metrics.push_back(make_metric(name));
        all.push_back(metrics.back().get());
        checkpoints.track(name, stateful(*metrics.back(), world));
      }
      checkpoints.restore_latest();
      body(world, all);
      checkpoints.save(1);
    });
  };
  const auto part = [](Metric& metric, int64_t begin, int64_t end) {
    torch::manual_seed(2);
    const auto outputs = torch::randn({60, 2}), targets = torch::randint(2, {60});
    metric.update(outputs.slice(0, begin, end), targets.slice(0, begin, end));
  };
  run(3, [&](World& world, const std::vector<Metric*>& metrics) {
    for (Metric* metric : metrics) part(*metric, world.rank() * 10, world.rank() * 10 + 10);
  });
  for (const int ranks : {3, 2, 1}) {
    spawn(ranks, [&](World& world) {
      for (const char* name : {"accuracy", "auc"}) {
        const auto metric = make_metric(name), whole = make_metric(name);
        Checkpointer reading(world.group(), folder / "saved");
        reading.track(name, stateful(*metric, world));
        metric->update(torch::ones({1, 2}), torch::ones({1}));  // gone after restoring
        reading.restore_latest({.allow_unexpected = {"*"}});
        const auto untracked = make_metric(name);
        untracked->update(torch::ones({1, 2}), torch::ones({1}));
        Checkpointer other(world.group(), folder / "saved");
        other.track("untracked", stateful(*untracked, world));
        EXPECT_THAT(
            message_of<CheckpointError>([&] { other.restore_latest({.allow_unexpected = {"*"}}); }),
            HasSubstr("is missing"));
        if (world.rank() == 0) part(*metric, 30, 60);
        part(*whole, 0, 60);
        EXPECT_EQ(metric->compute(world), whole->compute()) << name << " on " << ranks;
      }
    });
  }
}

// All three count two sums.
TEST(Metrics, CountsOfAnotherMetricAreRefused) {
  Accuracy accuracy;
  Mean mean("loss"), other_mean("reward");
  const auto update = [](Metric& metric) {
    metric.update(torch::ones({4, 2}), torch::ones({4}, torch::kLong));
  };
  update(accuracy);
  mean.update(2.0);
  for (Metric* metric : {static_cast<Metric*>(&mean), static_cast<Metric*>(&accuracy)}) {
    const auto before = metric->state();
    Perplexity perplexity;
    update(perplexity);
    EXPECT_THAT(message_of<ConfigError>([&] { metric->add(perplexity.state()); }),
                HasSubstr("counts of perplexity, ignoring -100 cannot be added to those of"));
    EXPECT_EQ(metric->state().sums, before.sums);
  }
  Accuracy all({.ignore_index = std::nullopt}), best_two({.top_k = 2}), equal;
  for (Metric* metric : {static_cast<Metric*>(&all), static_cast<Metric*>(&best_two)}) {
    EXPECT_THROW(metric->add(accuracy.state()), ConfigError);
  }
  equal.add(accuracy.state());
  other_mean.add(mean.state());
  EXPECT_EQ(equal.compute(), accuracy.compute());
  EXPECT_EQ(other_mean.compute(), 2);
  train::MetricState unknown = accuracy.state();
  unknown.kind.clear();
  equal.add(unknown);
  EXPECT_EQ(equal.compute(), accuracy.compute());
}

TEST(Metrics, ACheckpointOfAnotherMetricIsRefused) {
  const Folder folder;
  spawn(2, [&](World& world) {
    Mean mean;
    mean.update(3.0);
    Checkpointer saving(world.group(), folder / "saved");
    saving.track("metric", stateful(mean, world));
    saving.save(1);
    Accuracy accuracy;
    Checkpointer reading(world.group(), folder / "saved");
    reading.track("metric", stateful(accuracy, world));
    EXPECT_THAT(message_of<CheckpointError>([&] { reading.restore_latest(); }),
                HasSubstr("the saved counts are those of mean, and this is accuracy"));
    EXPECT_TRUE(accuracy.state().sums.empty());
  });
}

// As before metrics had a kind.
TEST(Metrics, CountsWithoutAKindAreRestored) {
  class WithoutKind : public checkpoint::Stateful {
   public:
    explicit WithoutKind(std::shared_ptr<Stateful> whole) : whole_(std::move(whole)) {}
    checkpoint::State state(const checkpoint::Names& names) const override {
      checkpoint::State state = whole_->state(names);
      state.values.clear();
      return state;
    }

   private:
    std::shared_ptr<Stateful> whole_;
  };
  const Folder folder;
  spawn(1, [&](World& world) {
    Mean mean, again;
    mean.update(3.0);
    Checkpointer saving(world.group(), folder / "saved");
    saving.track("metric", std::make_shared<WithoutKind>(stateful(mean, world)));
    saving.save(1);
    Checkpointer reading(world.group(), folder / "saved");
    reading.track("metric", stateful(again, world));
    reading.restore_latest();
    EXPECT_EQ(again.compute(), 3);
  });
}

}  // namespace
}  // namespace lockstep::test

// The data that a configuration names: of stages, and for evaluations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/train/loss.h"
#include "lockstep/train/run.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/printed.h"

namespace lockstep {
namespace {

using nlohmann::json;
using test::contents;
using test::Folder;
using test::message_of;
using test::printed;
using test::small_run;
using test::spawn_bare;
using testing::HasSubstr;

// A line of rows for each of the values.
std::string table_of(const std::string& kind, int rows) {
  std::string text = "a,kind\n";
  for (int i = 0; i < rows; ++i) text += std::to_string(i % 3) + "," + kind + "\n";
  return text;
}

// Which would teach the first class that its file has as class 0.
TEST(Run, AStageWithOtherDataHasTheTrainingsClasses) {
  const Folder folder;
  test::write(folder / "all.csv", table_of("cat", 2) + "0,dog\n1,dog\n");
  test::write(folder / "dogs.csv", table_of("dog", 40));
  auto config = small_run(folder / "csv");
  config.data = {.kind = "csv",
                 .path = folder / "all.csv",
                 .validation_path = folder / "dogs.csv",
                 .csv = {.scaling = "standard", .classification = true}};
  config.training.metrics = {"accuracy"};
  config.training.curriculum = {{.epochs = 20, .path = folder / "dogs.csv"}};
  config.training.epochs = 1;
  printed(2, config);
  EXPECT_EQ(json::parse(contents(folder / "csv/result.json"))["metrics"]["accuracy"], 1.0);
}

std::string idx(const std::vector<unsigned char>& values, int columns) {
  std::string text = {0, 0, 8, static_cast<char>(columns > 0 ? 2 : 1)};
  const auto rows = values.size() / static_cast<size_t>(std::max(columns, 1));
  text += {0, 0, 0, static_cast<char>(rows)};
  if (columns > 0) text += {0, 0, 0, static_cast<char>(columns)};
  for (const unsigned char value : values) text += static_cast<char>(value);
  return text;
}

// As numpy.save() writes an array of float64, which is what NumPy makes when nobody says otherwise.
std::string npy_of(const std::vector<double>& values, const std::string& shape) {
  std::string header = "{'descr': '<f8', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.resize(117, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header +
         std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
}

TEST(Run, SamplesOfFloat64AreTheModelsInputs) {
  const Folder folder;
  std::vector<double> x, y;
  for (int i = 0; i < 80; ++i) {
    x.insert(x.end(), {(i % 9) * 0.25 - 1, (i % 7) * 0.25 - 0.75});
    y.push_back(2 * x[2 * i] - x[2 * i + 1]);
  }
  test::write(folder / "x.npy", npy_of(x, "80, 2"));
  test::write(folder / "y.npy", npy_of(y, "80, 1"));
  for (const char* kind : {"linear", "mlp"}) {
    auto config = small_run(folder / kind);
    config.model.kind = kind;
    config.data = {.kind = "npy",
                   .path = folder / "x.npy",
                   .targets_path = folder / "y.npy",
                   .validation_fraction = 0.2};
    config.training.epochs = 40;
    printed(2, config);
    EXPECT_LT(json::parse(contents(folder / kind + "/result.json"))["metrics"]["mae"].get<double>(),
              0.2)
        << kind;
  }
}

// And would learn the targets of the training's file.
TEST(Run, AStageWithOtherDataHasTargetsOfItsOwn) {
  const Folder folder;
  const std::vector<unsigned char> ones(40, 1);
  std::vector<unsigned char> both(40, 0);
  both[0] = 1;
  test::write(folder / "x", idx(ones, 1));
  test::write(folder / "mixed", idx(both, 0));
  test::write(folder / "ones", idx(ones, 0));
  auto config = small_run(folder / "idx");
  config.data = {.kind = "idx",
                 .path = folder / "x",
                 .targets_path = folder / "mixed",
                 .validation_path = folder / "x",
                 .validation_targets_path = folder / "ones",
                 .max_samples = 4};
  config.training.metrics = {"accuracy"};
  config.training.curriculum = {
      {.epochs = 20, .path = folder / "x", .targets_path = folder / "ones"}};
  config.training.epochs = 1;
  config.optimizer.learning_rate = 0.05;
  printed(1, config);
  EXPECT_EQ(json::parse(contents(folder / "idx/result.json"))["metrics"]["accuracy"], 1.0);
}

TEST(Losses, TakeTargetsOfAnyDtype) {
  const at::Tensor outputs = torch::tensor({{0.5F, -2.0F, 3.0F}, {0.25F, 1.0F, -4.0F}});
  const auto expect_as_float = [&](const train::Loss& loss, const at::Tensor& targets,
                                   const std::vector<at::ScalarType>& dtypes) {
    const auto of = [&](const at::Tensor& these) {
      const auto leaf = outputs.clone().requires_grad_();
      const auto value = loss(leaf, these);
      value.backward();
      return torch::cat({value.detach().view(1).to(at::kDouble), leaf.grad().view(-1)});
    };
    const auto expected = of(targets);
    for (const auto dtype : dtypes) {
      EXPECT_TRUE(at::allclose(of(targets.to(dtype)), expected)) << dtype;
    }
  };
  const at::Tensor values = torch::tensor({{1.0F, 0.0F, 1.0F}, {0.0F, 0.0F, 1.0F}});
  for (const auto& loss :
       {train::mse(), train::l1(), train::huber(), train::huber(0.5), train::bce_with_logits()}) {
    expect_as_float(loss, values, {at::kDouble, at::kLong, at::kInt, at::kByte, at::kBool});
  }
  const at::Tensor classes = torch::tensor({2, 0});
  for (const auto& loss : {train::cross_entropy(), train::nll()}) {
    expect_as_float(loss, classes, {at::kInt, at::kShort, at::kByte});
  }
  expect_as_float(train::cross_entropy(), values, {at::kDouble});
}

TEST(Run, WhatWouldHaveNoEffectIsRefused) {
  const Folder folder;
  test::write(folder / "t.csv", table_of("1", 20));
  const auto expect = [&](const std::string& text, const std::string& more) {
    const auto config =
        train::parse_config("data: {kind: csv, path: " + folder / "t.csv" + more, "run.yaml");
    spawn_bare(2, [&](int) {
      EXPECT_THAT(message_of<ConfigError>([&] { train::run(config); }), HasSubstr(text));
    });
  };
  expect("[run] training.metrics: there is no data to evaluate with",
         "}\ntraining: {metrics: [mae]}");
  expect("[run] training.eval_steps: there is no data to evaluate with",
         "}\ntraining: {eval_strategy: steps, eval_steps: 3}");
  expect("cross_entropy of outputs [10, 1], which are of one class",
         "}\ntraining: {loss: cross_entropy, batch_size: 10}");
  expect("training.label_smoothing is of cross_entropy", "}\ntraining: {label_smoothing: 0.1}");
  auto mnist =
      train::parse_config("data: {kind: fashion-mnist, validation_path: /none}", "run.yaml");
  spawn_bare(1, [&](int) {
    EXPECT_THAT(message_of<DataError>([&] { train::run(mnist); }), HasSubstr("/none"));
  });
}

TEST(Run, ATableIsScaledByItsTrainingPart) {
  const Folder folder;
  std::string rows = "a,b,kind\n";
  for (int i = 0; i < 40; ++i) {
    rows += std::to_string(i % 7) + "," + std::to_string(1000 * (i % 5)) + "," +
            (i % 7 > 3 ? "large" : "small") + "\n";
  }
  test::write(folder / "table.csv", rows);
  auto config = small_run(folder / "ddp");
  config.data.kind = "csv";
  config.data.path = folder / "table.csv";
  config.data.csv.classification = true;
  config.data.csv.scaling = "standard";
  config.training.epochs = 8;
  config.training.metrics = {"accuracy"};
  const std::string text = printed(2, config);
  EXPECT_THAT(text, HasSubstr("linear: 6 parameters; csv: 32 samples, evaluated on 8"));
  const auto result = json::parse(contents(folder / "ddp/result.json"));
  EXPECT_GE(result["metrics"]["accuracy"].get<double>(), 0.7);
  config.parallel.strategy = "fsdp";
  config.logging.output_dir = folder / "fsdp";
  printed(2, config);
  EXPECT_EQ(json::parse(contents(folder / "fsdp/result.json"))["metrics"], result["metrics"]);
}

}  // namespace
}  // namespace lockstep

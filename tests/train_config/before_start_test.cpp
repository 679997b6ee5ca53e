// What the ranks would refuse is refused in the check.
#include <gmock/gmock.h>
#include <stdlib.h>

#include <filesystem>

#include "lockstep/train/config_source.h"
#include "support/folder.h"
#include "train_config/read.h"

namespace lockstep::train {
namespace {

// Of a file that a run is started with.
std::string not_started(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return test::message_of<ConfigError>(
      [&] { load_config(ConfigSource{.name = "run.yaml", .text = text}, overrides); });
}

using testing::AllOf;
using testing::HasSubstr;

TEST(BeforeStart, AdamsAveragesHaveToForget) {
  EXPECT_THAT(not_started("optimizer: {kind: adamw, beta1: 1}"),
              HasSubstr("run.yaml:1:26: optimizer.beta1: 1 never forgets"));
  EXPECT_THAT(not_started("optimizer: {beta2: 1}"), HasSubstr("optimizer.beta2: "));
  EXPECT_EQ(not_started("optimizer: {beta1: 0.999}"), "nothing");
}

TEST(BeforeStart, LanesAreTheSameOnAnyNumberOfRanks) {
  EXPECT_THAT(not_started("parallel: {lanes: 4, sync_bn: true}"),
              HasSubstr("run.yaml:1:22: parallel.sync_bn: its statistics are over ranks"));
  EXPECT_THAT(not_started("parallel: {lanes: 4, hook: fp16}"),
              HasSubstr("parallel.hook: a hook is"));
  EXPECT_THAT(not_started("parallel: {lanes: 2}\nlaunch: {nproc_per_node: 3}"),
              HasSubstr("parallel.lanes: 2 lanes for 3 ranks (launch.nproc_per_node)"));
  EXPECT_THAT(not_started("parallel: {lanes: 3}\nlaunch: {nproc_per_node: 2, nnodes: '2:4'}"),
              HasSubstr("3 lanes for 4 ranks (launch.nproc_per_node, launch.nnodes)"));
  EXPECT_EQ(not_started("parallel: {lanes: 4}\nlaunch: {nproc_per_node: 2, nnodes: 2}"), "nothing");
  // Another launcher has started the ranks.
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "2", 1);
  EXPECT_EQ(not_started("parallel: {lanes: 2}\nlaunch: {nproc_per_node: 3}"), "nothing");
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
}

TEST(BeforeStart, AFolderOfCheckpointsIsNoneOfThem) {
  const test::Folder folder;
  const std::string run = folder / "run", newest = run + "/checkpoints/step-00000126";
  std::filesystem::create_directories(newest);
  test::write(run + "/checkpoints/latest", "step-00000126 22d2828abecd889c\n");
  for (const std::string& from : {run, run + "/checkpoints"}) {
    EXPECT_THAT(not_started("output_dir: o\ncheckpoint: {resume: '" + from + "'}"),
                HasSubstr("checkpoint.resume: " + run +
                          "/checkpoints is a folder of checkpoints: "
                          "name one, such as " +
                          newest + ", or write latest"));
  }
  const std::string resuming = "output_dir: o\ncheckpoint: {resume: '" + newest + "'}";
  EXPECT_THAT(not_started(resuming), HasSubstr("checkpoint.resume: " + newest +
                                               " has no checkpoint: name the folder of one"));
  test::write(newest + "/manifest.json", "{}");
  EXPECT_EQ(not_started(resuming), "nothing");
}

TEST(BeforeStart, WhatLooksAtEvaluationsNeedsDataForThem) {
  const std::string data = "data: {kind: csv, path: x.csv}\n";
  for (const auto& [text, key] :
       {std::pair<std::string, std::string>{"metrics: [mse]", "training.metrics"},
        {"schedule: plateau", "schedule.kind"},
        {"training: {early_stopping: {metric: loss}}", "training.early_stopping.metric"},
        {"output_dir: o\ncheckpoint: {best_metric: loss}", "checkpoint.best_metric"}}) {
    EXPECT_THAT(not_started(data + text),
                AllOf(HasSubstr(key + ": there is no data to evaluate with"),
                      HasSubstr("give data.validation_path or data.validation_fraction")));
    EXPECT_EQ(not_started(data + text, {"data.validation_fraction=0.1"}), "nothing");
    EXPECT_EQ(not_started("data: mnist\n" + text, {"data.path=x"}), "nothing");
  }
}

TEST(BeforeStart, ATextMayHaveANameThatNoFileCanHave) {
  const ConfigSource source{.name = std::string(300, 'a'), .text = "seed: 3"};
  EXPECT_EQ(load_config(source).training.seed, 3);
}

TEST(BeforeStart, LossesAndMetricsFitTheTargets) {
  EXPECT_THAT(not_started("training: {loss: mse}"),
              HasSubstr("training.loss: mse compares element by element, and the targets of "
                        "data.kind fashion-mnist are class numbers"));
  EXPECT_EQ(not_started("training: {loss: mse}\nmodel: {kind: mlp, outputs: 1}"), "nothing");
  EXPECT_THAT(not_started("training: {metrics: [auc]}"),
              HasSubstr("training.metrics: auc is of two classes, and there are 10"));
  EXPECT_EQ(not_started("training: {loss: mse}\nmodel: {kind: mlp, outputs: 1}"), "nothing");
  EXPECT_THAT(not_started("model: {kind: mlp, outputs: 5}"),
              HasSubstr("model.outputs: 5 for the 10 classes of data.kind fashion-mnist"));
  EXPECT_EQ(not_started("model: {kind: mlp, outputs: 12}"), "nothing");
  for (const std::string kind : {"linear", "mlp", "convnet", "resnet18"}) {
    EXPECT_THAT(not_started("training: {loss: nll}\nmodel: " + kind),
                HasSubstr("training.loss: nll takes logarithms of probabilities, and model.kind " +
                          kind + " gives scores"));
  }
}

}  // namespace
}  // namespace lockstep::train

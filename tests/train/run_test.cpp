// A run as a configuration describes it, and what it prints and writes.
#include "lockstep/train/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/network/address.h"
#include "lockstep/core/preemption.h"
#include "lockstep/train/metrics.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/net.h"
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
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using train::Registry;
using train::RunConfig;
using train::RunState;

std::vector<json> lines_of(const std::string& text) {
  std::vector<json> all;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) all.push_back(json::parse(line));
  return all;
}

TEST(Run, SaysWhatItDoesAndWritesItsFiles) {
  const Folder folder;
  const std::string text = printed(2, small_run(folder / "run"));
  EXPECT_THAT(text,
              AllOf(HasSubstr("linear: 2 parameters; synthetic-regression: 80 samples, "
                              "evaluated on 20"),
                    HasSubstr("2 ranks on 1 host, shm"),
                    HasSubstr("batch 4 per rank x 2 ranks x 1 accumulated = 8 samples a step"),
                    HasSubstr("30 steps in 3 epochs; sgd, learning rate 0.05 x 2 (linear "
                              "scaling) = 0.1, constant")));
  EXPECT_THAT(text, AllOf(HasSubstr("epoch 2/3  step 20/30  66 %  loss 0."),
                          HasSubstr("evaluated after step 30:  loss 0.0"),
                          HasSubstr("finished after step 30"), HasSubstr("peak memory by rank: "),
                          Not(HasSubstr("epoch 4/3"))));

  const auto result = json::parse(contents(folder / "run/result.json"));
  EXPECT_EQ(result["status"], "finished");
  EXPECT_EQ(result["exit_status"], 0);
  EXPECT_EQ(result["step"], 30);
  EXPECT_EQ(result["samples"], 240);
  EXPECT_EQ(result["world_size"], 2);
  EXPECT_EQ(result["peak_bytes"].size(), 2u);
  EXPECT_DOUBLE_EQ(result["samples_per_s"].get<double>() * result["seconds"]["steps"].get<double>(),
                   result["samples"].get<double>());
  EXPECT_GT(result["seconds"]["communication"], 0);
  EXPECT_LE(result["seconds"]["communication"], result["seconds"]["steps"]);

  std::map<std::string, int> types;
  std::vector<json> steps;
  for (const auto& line : lines_of(contents(folder / "run/metrics.jsonl"))) {
    ++types[line["type"]];
    if (line["type"] == "step") steps.push_back(line);
    if (line["type"] == "run") {
      EXPECT_EQ(line["config"]["data.kind"], "synthetic-regression");
      EXPECT_EQ(line["config"]["training.seed"], "1");
    }
    if (line["type"] == "end") {
      EXPECT_EQ(line["outcome"], "finished");
    }
    if (line["type"] == "evaluation" && line["step"] == 30) {
      EXPECT_EQ(line["metrics"], result["metrics"]);
    }
  }
  EXPECT_EQ(types["run"], 1);
  EXPECT_EQ(types["evaluation"], 3);
  EXPECT_EQ(types["end"], 1);
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[1]["step"], 20);
  EXPECT_EQ(steps[1]["samples"], 160);
  EXPECT_DOUBLE_EQ(steps[1]["learning_rate"], 0.1);
  EXPECT_TRUE(result["metrics"].contains("mae"));
  EXPECT_THAT(contents(folder / "run/config.yaml"), HasSubstr("synthetic-regression"));
}

TEST(Run, EvaluatesTheSameOnAnyNumberOfRanksWithLanes) {
  const Folder folder;
  std::vector<json> metrics;
  for (const int ranks : {1, 2, 3}) {
    auto config = small_run(folder / std::to_string(ranks));
    config.parallel.lanes = 4;
    config.optimizer.lr_scaling = "sqrt";
    config.schedule = {.kind = "cosine", .warmup_ratio = 0.1};
    const std::string text = printed(ranks, config);
    EXPECT_THAT(text, HasSubstr("batch 4 per lane x 4 lanes x 1 accumulated = 16 samples a step"));
    metrics.push_back(json::parse(contents(config.logging.output_dir + "/result.json")));
  }
  EXPECT_EQ(metrics[0]["metrics"], metrics[1]["metrics"]);
  EXPECT_EQ(metrics[0]["metrics"], metrics[2]["metrics"]);
  EXPECT_EQ(metrics[0]["train_loss"], metrics[2]["train_loss"]);
}

TEST(Run, AFolderThatCannotBeMadeIsNamed) {
  const Folder folder;
  test::write(folder / "file", "");
  spawn_bare(2, [&](int) {
    EXPECT_THAT(message_of<Error>([&] { train::run(small_run(folder / "file/run")); }),
                HasSubstr("/file/run cannot be made: Not a directory"));
  });
}

TEST(Run, AnAddressThatIsTakenLeavesTheEarlierResult) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.checkpoint.save_strategy = "no";
  printed(1, config);
  const std::string before = contents(folder / "run/result.json");
  const auto taken = listen_at(Address::loopback(0), 0);
  config.logging.prometheus_address =
      "127.0.0.1:" + std::to_string(local_address(taken.value().get()).port());
  spawn_bare(2, [&](int) {
    EXPECT_THAT(message_of<Error>([&] { train::run(config); }), HasSubstr("already in use"));
  });
  EXPECT_EQ(contents(folder / "run/result.json"), before);
}

TEST(Run, ResumesWhenItIsAskedTo) {
  const Folder folder;
  auto config = small_run(folder / "run");
  printed(2, config);
  const auto before = json::parse(contents(folder / "run/result.json"));
  config.training.epochs = 4;
  config.checkpoint.resume = "latest";
  printed(2, config);
  const auto after = json::parse(contents(folder / "run/result.json"));
  EXPECT_EQ(before["step"], 30);
  EXPECT_EQ(after["step"], 40);
  EXPECT_EQ(after["resumed_at"], 30);
}

TEST(Run, CurriculumStagesComeBeforeAllData) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.training.curriculum = {{.epochs = 2, .fraction = 0.5}};
  config.training.epochs = 1;
  const std::string text = printed(1, config);
  // 40 of 80 samples twice, then all of them.
  EXPECT_THAT(text, AllOf(HasSubstr("40 steps;"), HasSubstr("stage 1  epoch 2/2  step 20/40"),
                          HasSubstr("stage all  epoch 1/1  step 40/40")));
}

TEST(Run, AFailureIsInItsResult) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.optimizer.learning_rate = 1e30;
  spawn_bare(2, [&](int) {
    EXPECT_THAT(message_of([&] { train::run(config); }), HasSubstr("[train] step "));
  });
  const auto result = json::parse(contents(folder / "run/result.json"));
  EXPECT_EQ(result["status"], "failed");
  EXPECT_THAT(std::string(result["error"]), HasSubstr("the loss is"));
  const auto last = lines_of(contents(folder / "run/metrics.jsonl")).back();
  EXPECT_EQ(last["type"], "end");
  EXPECT_EQ(last["failed"], true);
}

TEST(Run, CommunicationIsKnownUnderFsdpToo) {
  const Folder folder;
  RunConfig config = small_run(folder / "run");
  config.parallel.strategy = "fsdp";
  printed(2, config);
  EXPECT_GT(json::parse(contents(folder / "run/result.json"))["seconds"]["communication"], 0);
}

TEST(Run, TheResultOfARunBeforeIsGone) {
  const Folder folder;
  test::write(folder / "result.json", "{}");
  Registry registry;
  registry.add_data("own", [&](const RunConfig&, const World&) -> train::RunData {
    EXPECT_FALSE(std::filesystem::exists(folder / "result.json"));
    throw DataError("no data");
  });
  RunConfig config = small_run(folder / "");
  config.data.kind = "own";
  spawn_bare(1, [&](int) { EXPECT_THROW(train::run(config, registry), DataError); });
  EXPECT_FALSE(std::filesystem::exists(folder / "result.json"));
}

TEST(Run, ItsLogSaysWhyItEnded) {
  const Folder folder;
  const auto outcome = [](const RunConfig& config) {
    return lines_of(contents(config.logging.output_dir + "/metrics.jsonl")).back()["outcome"];
  };
  auto config = small_run(folder / "preempted");
  config.training.loss = "own";
  Registry registry;
  registry.add_loss("own", [](const RunConfig&) -> train::Loss {
    return [of = train::mse(), calls = 0](const auto& outputs, const auto& targets) mutable {
      if (++calls == 3) raise(SIGUSR1);
      return of(outputs, targets);
    };
  });
  spawn_bare(1, [&](int) { EXPECT_EQ(train::run(config, registry), kRequeueStatus); });
  EXPECT_EQ(outcome(config), "preempted");
  config = small_run(folder / "stopped");
  config.training.epochs = 6;
  config.training.early_stopping = {.metric = "mae", .patience = 1, .min_delta = 1e9};
  printed(1, config);
  EXPECT_EQ(outcome(config), "early stopping");
}

TEST(Run, ASignalIsTheProgramsWhereNothingIsToBeSavedForIt) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.checkpoint.save_on_preemption = false;
  config.training.loss = "own";
  Registry registry;
  registry.add_loss("own", [](const RunConfig&) -> train::Loss {
    return [of = train::mse()](const auto& outputs, const auto& targets) {
      raise(SIGUSR1);
      return of(outputs, targets);
    };
  });
  spawn_bare(1, [&](int) {
    signal(SIGUSR1, SIG_IGN);
    EXPECT_EQ(train::run(config, registry), 0);
  });
}

TEST(Run, RanksThatAreStartedAgainGoOnAndOthersAreRefused) {
  const Folder folder;
  const auto config = small_run(folder / "run");
  const auto run = [&](const char* job, const char* restarts) {
    spawn_bare(2, [&](int) {
      setenv("LOCKSTEP_JOB_ID", job, 1);
      setenv("TORCHELASTIC_RUN_ID", "name", 1);  // which two jobs may have alike
      setenv("TORCHELASTIC_RESTART_COUNT", restarts, 1);
      train::run(config);
    });
    return json::parse(contents(folder / "run/result.json"));
  };
  const auto refused = [&](const char* job, const char* restarts) {
    spawn_bare(2, [&](int) {
      setenv("LOCKSTEP_JOB_ID", job, 1);
      setenv("TORCHELASTIC_RUN_ID", "name", 1);
      setenv("TORCHELASTIC_RESTART_COUNT", restarts, 1);
      EXPECT_THAT(message_of<ConfigError>([&] { train::run(config); }),
                  HasSubstr("has checkpoints of a run already"));
    });
  };
  const auto first = run("a", "0");
  const auto again = run("a", "1");
  EXPECT_EQ(again["resumed_at"], 30);
  EXPECT_EQ(again["train_loss"], first["train_loss"]);
  EXPECT_EQ(again["epoch"], first["epoch"]);
  // And who is refused leaves what is another's as it is.
  const auto before = contents(folder / "run/result.json");
  const auto settings = contents(folder / "run/config.yaml");
  refused("a", "0");
  refused("b", "1");
  EXPECT_EQ(contents(folder / "run/result.json"), before);
  EXPECT_EQ(contents(folder / "run/config.yaml"), settings);
}

TEST(Run, ThatGoesBackInItsFolderDoesSoAgainUntilItHasSavedSomething) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.checkpoint.save_total_limit = 0;
  const auto run = [&](const char* job, const char* restarts, int breaks_at) {
    Registry registry;
    registry.add_loss("own", [=](const RunConfig&) {
      return [=, calls = 0](const at::Tensor& outputs, const at::Tensor& targets) mutable {
        if (++calls == breaks_at) throw std::runtime_error("broken");
        return torch::mse_loss(outputs, targets);
      };
    });
    spawn_bare(2, [&](int) {
      setenv("LOCKSTEP_JOB_ID", job, 1);
      setenv("TORCHELASTIC_RESTART_COUNT", restarts, 1);
      EXPECT_EQ(breaks_at > 0, message_of<std::exception>([&] {
                                 train::run(config, registry);
                               }).find("broken") != std::string::npos);
    });
    return json::parse(contents(folder / "run/result.json"));
  };
  config.training.loss = "own";
  run("a", "0", 0);
  config.checkpoint.resume = folder / "run/checkpoints/step-00000010";
  run("b", "0", 1);
  run("b", "1", 1);
  // What job a has saved behind it is none of this job's.
  EXPECT_EQ(run("b", "2", 0)["resumed_at"], 10);
  EXPECT_EQ(run("b", "3", 0)["resumed_at"], 30);
}

TEST(Run, AProgramAddsItsOwnModelDataLossAndMetric) {
  const Folder folder;
  struct Twice : train::Mean {
    using Mean::update;
    Twice() : train::Mean("twice") {}
    void update(const at::Tensor& outputs, const at::Tensor& targets, const at::Tensor&) override {
      train::Mean::update(2 * (outputs - targets).abs(), {}, {});
    }
  };
  Registry registry;
  registry
      .add_model("own",
                 [](const RunConfig& config, const train::SampleShape& shape) -> train::Model {
                   EXPECT_EQ(config.extra_value<int64_t>("model.width"), 5);
                   return torch::nn::Linear(shape.features(), shape.outputs());
                 },
                 {{.name = "width", .fallback = int64_t{3}}})
      .add_data("own",
                [](const RunConfig&, const World&) {
                  return train::RunData{.training = std::make_shared<data::TensorDataset>(
                                            torch::ones({12, 2}), torch::ones({12, 3}))};
                })
      .add_loss("own", [](const RunConfig&) { return train::l1(); })
      .add_metric("twice", [](const RunConfig&, const train::SampleShape&) {
        return std::make_shared<Twice>();
      });
  const auto config = train::parse_config(
      "model: {kind: own, width: 5}\ndata: {kind: own, validation_fraction: 0.5}\n"
      "training: {batch_size: 2, loss: own, metrics: [twice]}\n"
      "logging: {output_dir: " +
          folder / "run" + "}\n",
      "own.yaml", {}, registry.extensions());
  printed(1, config, registry);
  const auto metrics = json::parse(contents(folder / "run/result.json"))["metrics"];
  EXPECT_NEAR(metrics["twice"].get<double>(), 2 * metrics["loss"].get<double>(), 1e-6);
  EXPECT_THAT(message_of<ConfigError>([&] {
                registry.add_model("mlp", [](const auto&, const auto&) { return train::Model(); });
              }),
              HasSubstr("model.kind 'mlp' is there already"));
}

TEST(Run, ItsProgramMakesErrorsIntoStatuses) {
  const Folder folder;
  const auto status = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "program");
    std::vector<char*> pointers;
    for (auto& word : words) pointers.push_back(word.data());
    return train::run_program(static_cast<int>(words.size()), pointers.data());
  };
  test::write(folder / "run.yaml",
              "model: {kind: linear}\ndata: {kind: synthetic-regression}\n"
              "training: {max_steps: 3}\n");
  spawn_bare(1, [&](int) {
    EXPECT_EQ(status({"--config", folder / "run.yaml", "--set", "training.batch_size=7"}), 0);
    EXPECT_EQ(status({"--config=" + folder / "run.yaml", "--set=training.batch_size=0"}), 2);
    EXPECT_EQ(status({"--config", folder / "none.yaml"}), 2);
    EXPECT_EQ(status({"--wrong"}), 2);
    EXPECT_EQ(status({}), 2);
    EXPECT_EQ(status({"--help"}), 0);
    EXPECT_EQ(status({folder / "run.yaml", "--set", "optimizer.learning_rate=1e38"}), 1);
  });
}

TEST(Run, ATimeBelowAMillisecondIsALimitToo) {
  const Folder folder;
  for (const double seconds : {1e-9, 1e300}) {
    auto config = small_run(folder / "run" + std::to_string(seconds > 1));
    config.training.max_seconds = seconds;
    printed(1, config);
    const auto result = json::parse(contents(config.logging.output_dir + "/result.json"));
    EXPECT_EQ(result["status"], seconds > 1 ? "finished" : "time limit");
  }
}

// The process takes its time to end, and the launcher passes signals on to it.
TEST(Run, ASignalBehindItsEndDoesNotKillAFinishedProgram) {
  const Folder folder;
  test::write(folder / "run.yaml",
              "model: {kind: linear}\ndata: {kind: synthetic-regression}\n"
              "training: {max_steps: 3}\nlogging: {output_dir: " +
                  folder / "run" + "}\n");
  const std::string file = folder / "run.yaml";
  spawn_bare(1, [&](int) {
    std::string program = "program", given = file, wrong = "--set=optimizer.learning_rate=1e38";
    char* words[] = {program.data(), given.data(), wrong.data()};
    EXPECT_EQ(train::run_program(2, words), 0);
    raise(SIGUSR1);
    raise(SIGTERM);
    EXPECT_EQ(train::run_program(3, words), 2);  // the folder has checkpoints
    raise(SIGUSR1);
  });
}

TEST(Progress, NeedsNoTrainer) {
  std::ostringstream out;
  train::Progress progress(out, {.every_steps = 2});
  train::Requests requests;
  RunState state{.epochs = 2, .steps = 8, .step_samples = 10, .learning_rate = 0.5};
  progress.on_train_begin(state);
  for (int64_t step = 1; step <= 3; ++step) {
    state.step = step;
    state.loss = static_cast<double>(step);
    state.seconds = static_cast<double>(step);
    progress.on_step_end(state, requests);
  }
  EXPECT_EQ(out.str(), "epoch 1/2  step 2/8  25 %  loss 1.500  lr 0.5  10 samples/s  6.0 s left\n");
  state.metrics = {{"accuracy", 0.25}};
  progress.on_evaluate(state, requests);
  EXPECT_THAT(out.str(), HasSubstr("evaluated after step 3:  accuracy 0.2500\n"));
  state.rank = 1;
  const auto before = out.str();
  progress.on_evaluate(state, requests);
  EXPECT_EQ(out.str(), before);
}

}  // namespace
}  // namespace lockstep

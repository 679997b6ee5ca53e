// What a run would overwrite, not be able to write, or not learn from: refused before it trains.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/models/pretrained.h"
#include "lockstep/train/run.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "train/printed.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::contents;
using test::Folder;
using test::message_of;
using test::printed;
using test::small_run;
using test::spawn_bare;
using testing::HasSubstr;
using train::RunConfig;

// On two ranks; the message that all have.
void expect_refused(const RunConfig& config, const std::string& why) {
  spawn_bare(2, [&](int) {
    EXPECT_THAT(message_of<ConfigError>([&] { train::run(config); }), HasSubstr(why));
  });
}

TEST(RunRefusals, TheUsersFileIsNotReplacedByConfigYaml) {
  const Folder folder;
  fs::create_directory(folder / "exp");
  const std::string file = folder / "exp/config.yaml";
  const std::string text =
      "# mine\ndata: synthetic-regression\ntraining: {epochs: 2}\noutput_dir: " + (folder / "exp") +
      "\n";
  test::write(file, text);
  expect_refused(
      load_config(file, {"training.epochs=1", "training.seed=4"}),
      "/exp/config.yaml is the file of this run, and the run's config.yaml, which is not "
      "the same, as training.epochs, training.seed was set: give the file another name");
  EXPECT_FALSE(fs::exists(folder / "exp/checkpoints"));
  EXPECT_EQ(contents(file), text);
  // It says what the run does, also with the same value again, and where it is resumed.
  printed(1, load_config(file, {"training.epochs=2"}));
  EXPECT_EQ(contents(file), text);
  EXPECT_EQ(json::parse(contents(folder / "exp/result.json"))["step"], 32);
  printed(1, load_config(file, {"checkpoint.resume=latest", "launch.node_rank=0"}));
  EXPECT_EQ(contents(file), text);
}

TEST(RunRefusals, TheConfigurationOfARunBeginsAnother) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.checkpoint.save_strategy = "no";
  printed(1, config);
  const std::string written = contents(folder / "run/config.yaml");
  printed(1, load_config(folder / "run/config.yaml"));
  EXPECT_EQ(contents(folder / "run/config.yaml"), written);
  const std::string other = folder / "other";
  printed(1, load_config(folder / "run/config.yaml", {"output_dir=" + other}));
  EXPECT_THAT(contents(other + "/config.yaml"), HasSubstr("run/config.yaml:"));
}

TEST(RunRefusals, AResultThatCannotBeWrittenIsFoundBeforeTraining) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.logging.result_file = folder / "place";
  fs::create_directory(folder / "place");
  expect_refused(config, "[run] logging.result_file: " + (folder / "place") + " is a folder");
  config.logging.result_file = "/proc/result.json";
  spawn_bare(2, [&](int) {
    EXPECT_THAT(message_of<Error>([&] { train::run(config); }),
                HasSubstr("[run] /proc/result.json cannot be written: "));
  });
  EXPECT_FALSE(fs::exists(folder / "run/checkpoints"));
  config.logging.result_file = folder / "result.json";
  printed(1, config);
  EXPECT_TRUE(fs::exists(folder / "result.json"));
  EXPECT_FALSE(fs::exists(folder / "result.json.probe"));
}

// Tokens from 0 to `most`, as a file of plain numbers.
std::string tokens(const Folder& folder, uint16_t most) {
  std::string bytes;
  for (int i = 0; i < 200; ++i) {
    const auto token = static_cast<uint16_t>(i % (most + 1));
    bytes.push_back(static_cast<char>(token & 0xff));
    bytes.push_back(static_cast<char>(token >> 8));
  }
  test::write(folder / "tokens.bin", bytes);
  return folder / "tokens.bin";
}

RunConfig language_run(const std::string& data, const std::string& output) {
  RunConfig config;
  config.model.kind = "transformer";
  config.model.transformer = {
      .vocabulary = 50, .layers = 1, .hidden = 8, .heads = 2, .max_length = 16};
  config.data.kind = "tokens";
  config.data.path = data;
  config.data.tokens.sequence_length = 8;
  config.training = {.max_steps = 2, .batch_size = 2, .eval_strategy = "no"};
  config.logging.output_dir = output;
  return config;
}

TEST(RunRefusals, TheModelThatItBeginsWithIsNotReplaced) {
  const Folder folder;
  auto config = language_run(tokens(folder, 49), folder / "run");
  config.checkpoint.save_strategy = "no";
  printed(1, config);
  const std::string before = contents(folder / "run/model/model.safetensors");
  config.model.transformer = {.pretrained = folder / "run/model"};
  expect_refused(config, "[run] model.pretrained is " + (folder / "run/model") +
                             ", where this run writes its own model");
  EXPECT_EQ(contents(folder / "run/model/model.safetensors"), before);
  config.logging.output_dir = folder / "next";
  printed(1, config);
  EXPECT_TRUE(fs::exists(folder / "next/model/model.safetensors"));
}

TEST(RunRefusals, TokensThatTheModelDoesNotKnowAreNamedWithTheKeys) {
  const Folder folder;
  auto config = language_run(tokens(folder, 49), folder / "run");
  config.model.transformer.vocabulary = 49;
  expect_refused(config,
                 "[run] data.path has the token 49, and the model's vocabulary is 49: give "
                 "a larger model.vocabulary, or the data.dtype");
  config.model.transformer.vocabulary = 50;
  config.data.tokens.dtype = "uint32";
  expect_refused(config, "or the data.dtype in which the file was written");
}

// Not among the samples that are looked at first.
TEST(RunRefusals, TokensThatComeLaterAreNamedToo) {
  const Folder folder;
  auto config = language_run(folder / "tokens.bin", folder / "run");
  std::string bytes(2 * 8 * 80, '\0');
  bytes[2 * 8 * 70] = 60;
  test::write(folder / "tokens.bin", bytes);
  config.training.max_steps = 0;
  config.training.batch_size = 1;
  spawn_bare(1, [&](int) {
    EXPECT_THAT(message_of<ConfigError>([&] { train::run(config); }),
                HasSubstr("data.path has the token 60, and the model's vocabulary is 50"));
  });
}

TEST(RunRefusals, TheLowestRateIsComparedWithTheScaledOne) {
  const Folder folder;
  auto config = small_run(folder / "run");
  config.schedule = {.kind = "cosine", .min_lr = 0.08};
  EXPECT_THAT(printed(2, config), HasSubstr("0.05 x 2 (linear scaling) = 0.1, cosine"));
  config.logging.output_dir = folder / "other";
  config.schedule.min_lr = 0.11;
  expect_refused(config,
                 "schedule.min_lr: 0.11 is above optimizer.learning_rate 0.05, which "
                 "lr_scaling linear makes 0.1");
}

// sgd's momentum, of which each number costs as much memory as a parameter.
TEST(Run, OneCycleMovesMomentumUnlessItIsToldNot) {
  const Folder folder;
  const auto loss = [&](bool cycle, double momentum, const char* kept) {
    const std::string place = folder / (std::to_string(cycle) + std::to_string(momentum));
    auto config = small_run(place);
    config.schedule = {.kind = "one_cycle", .cycle_momentum = cycle};
    config.optimizer.momentum = momentum;
    config.model.kind = "mlp";
    config.model.mlp.hidden = {1000, 500};
    config.training.max_steps = 5;
    const std::string text = printed(1, config);
    EXPECT_EQ(text.find("with momentum from 0.95 to 0.85 and back") != text.npos, cycle);
    EXPECT_THAT(text, HasSubstr(kept));
    return json::parse(contents(place + "/result.json"))["train_loss"].get<double>();
  };
  EXPECT_EQ(loss(true, 0, "optimizer 2.0 MB"), loss(true, 0.5, "optimizer 2.0 MB"));
  EXPECT_NE(loss(false, 0, "optimizer 0.0 MB"), loss(false, 0.5, "optimizer 2.0 MB"));
}

}  // namespace
}  // namespace lockstep

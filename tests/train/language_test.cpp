// Runs of a transformer on tokens, as a configuration describes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/data/token_dataset.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/text/tokenizer_trainer.h"
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
using test::spawn_bare;
using testing::AllOf;
using testing::HasSubstr;
using train::RunConfig;

// 300 short documents of few words, and the tokenizer that was trained on them.
std::string corpus(const Folder& folder) {
  std::vector<std::string> texts;
  for (int i = 0; i < 300; ++i) {
    texts.push_back("the cat number " + std::to_string(i % 17) + " sat on mat " +
                    std::to_string(i % 5) + " and the dog saw it");
  }
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  const auto tokenizer = text::train_tokenizer(views, {.vocabulary = 290});
  const std::string path = folder / "corpus";
  text::TokenWriter writer(path, {.vocabulary = tokenizer.size(),
                                  .separator = tokenizer.id_of("<|endoftext|>").value()});
  for (const auto& each : texts) writer.add(tokenizer.encode(each));
  writer.finish();
  tokenizer.save(path + "/tokenizer.json");
  return path;
}

RunConfig small_run(const std::string& data, const std::string& output) {
  RunConfig config;
  config.model.kind = "transformer";
  config.model.transformer = {.layers = 2, .hidden = 16, .heads = 2, .max_length = 48};
  config.data.kind = "tokens";
  config.data.path = data;
  config.data.tokens.sequence_length = 24;
  config.data.validation_fraction = 0.1;
  config.optimizer = {.kind = "adamw", .learning_rate = 3e-3};
  config.training = {.max_steps = 8,
                     .batch_size = 2,
                     .max_grad_norm = 1,
                     .seed = 1,
                     .metrics = {"perplexity", "accuracy"},
                     .eval_strategy = "steps",
                     .eval_steps = 4,
                     .sample = {.prompt = "the cat", .max_new_tokens = 6}};
  config.checkpoint.save_strategy = "steps";
  config.checkpoint.save_steps = 4;
  config.checkpoint.resume = "latest";
  config.logging = {.logging_steps = 4, .output_dir = output};
  return config;
}

// The weights that Hugging Face's libraries would read.
std::string weights(const RunConfig& config) {
  return contents(config.logging.output_dir + "/model/model.safetensors");
}

json result(const RunConfig& config) {
  return json::parse(contents(config.logging.output_dir + "/result.json"));
}

TEST(LanguageRun, HasPerplexitySamplesAndAModelFolder) {
  const Folder folder;
  const auto config = small_run(corpus(folder), folder / "run");
  const std::string text = printed(2, config);
  EXPECT_THAT(text, AllOf(HasSubstr("transformer: "), HasSubstr("tokens: "),
                          HasSubstr("sample after step 4: the cat"),
                          HasSubstr("sample after step 8: the cat"), HasSubstr("perplexity ")));
  const auto metrics = result(config)["metrics"];
  EXPECT_NEAR(std::exp(metrics["loss"].get<double>()), metrics["perplexity"], 1e-4);
  EXPECT_LT(metrics["perplexity"], 290);
  EXPECT_THAT(contents(folder / "run/metrics.jsonl"), HasSubstr("\"kind\":\"sample\""));

  // The folder has the weights that were measured.
  auto net = models::load_transformer(folder / "run/model");
  const data::TokenDataset all(config.data.path, {.sequence_length = 24});
  const auto part = static_cast<int64_t>(std::llround(0.1 * static_cast<double>(all.size())));
  std::vector<int64_t> indices;
  for (int64_t i = all.size() - part; i < all.size(); ++i) indices.push_back(i);
  const auto batch = all.get_batch(indices);
  const at::NoGradGuard no_grad;
  EXPECT_NEAR(net->forward(batch.data, batch.target).item<double>(), metrics["loss"], 1e-5);
  const auto right = net->forward(batch.data).argmax(-1).eq(batch.target).to(at::kDouble).mean();
  EXPECT_NEAR(right.item<double>(), metrics["accuracy"], 1e-12);
  EXPECT_TRUE(std::filesystem::exists(folder / "run/model/tokenizer.json"));
}

TEST(LanguageRun, DocumentsEndWithTheTokenThatTheirFilesName) {
  const Folder folder;
  const std::string path = folder / "corpus";
  const auto tokenizer = text::train_tokenizer({"the cat sat on the mat"}, {.vocabulary = 265});
  const int32_t end = tokenizer.id_of("<|endoftext|>").value() - 1;
  text::TokenWriter writer(path, {.vocabulary = tokenizer.size(), .separator = end});
  for (int i = 0; i < 100; ++i) writer.add(tokenizer.encode("the cat sat on the mat"));
  writer.finish();
  tokenizer.save(path + "/tokenizer.json");
  printed(1, small_run(path, folder / "run"));
  const auto config = json::parse(contents(folder / "run/model/generation_config.json"));
  EXPECT_EQ(config["eos_token_id"], json({end}));
}

TEST(LanguageRun, AModelOfAFolderHasTheDropoutOfTheFile) {
  const Folder folder;
  const std::string data = corpus(folder);
  printed(1, small_run(data, folder / "first"));
  const auto tuned = [&](double dropout) {
    auto config = small_run(data, folder / std::to_string(dropout));
    config.model.transformer = {.pretrained = folder / "first/model", .dropout = dropout};
    printed(1, config);
    return weights(config);
  };
  EXPECT_NE(tuned(0.5), tuned(0));
}

TEST(LanguageRun, ResumesToTheSameBits) {
  const Folder folder;
  const std::string data = corpus(folder);
  for (const int ranks : {1, 2}) {
    const auto whole = small_run(data, folder / ("whole" + std::to_string(ranks)));
    printed(ranks, whole);
    auto part = small_run(data, folder / ("part" + std::to_string(ranks)));
    std::filesystem::create_directories(part.logging.output_dir + "/checkpoints");
    std::filesystem::copy(whole.logging.output_dir + "/checkpoints/step-00000004",
                          part.logging.output_dir + "/checkpoints/step-00000004",
                          std::filesystem::copy_options::recursive);
    printed(ranks, part);
    EXPECT_EQ(result(part)["resumed_at"], 4);
    EXPECT_EQ(result(part)["metrics"], result(whole)["metrics"]);
    EXPECT_EQ(weights(part), weights(whole));
  }
}

TEST(LanguageRun, HasTheSameBitsDividedRecomputedAndWithLanesOnAnyRanks) {
  const Folder folder;
  const std::string data = corpus(folder);
  int count = 0;
  const auto made = [&](int ranks, const std::function<void(RunConfig&)>& change) {
    auto config = small_run(data, folder / std::to_string(++count));
    config.training.max_grad_norm = 0;  // of shards it is added up in another order
    change(config);
    printed(ranks, config);
    return weights(config);
  };
  const auto plain = made(2, [](auto&) {});
  EXPECT_EQ(made(2, [](auto& c) { c.training.activation_checkpointing = "full"; }), plain);
  EXPECT_EQ(made(2, [](auto& c) { c.parallel.strategy = "fsdp"; }), plain);
  EXPECT_EQ(made(2,
                 [](auto& c) {
                   c.parallel.strategy = "fsdp";
                   c.parallel.fsdp.sharding_strategy = "SHARD_GRAD_OP";
                   c.parallel.fsdp.transformer_layer_cls_to_wrap = {"Qwen3DecoderLayer"};
                   c.parallel.fsdp.activation_checkpointing = true;
                 }),
            plain);
  EXPECT_EQ(made(2,
                 [&](auto& c) {
                   c.parallel.strategy = "fsdp";
                   c.parallel.fsdp.offload_folder = folder.path();
                 }),
            plain);
  const auto lanes = [](auto& c) {
    c.parallel.lanes = 3;
    c.training.gradient_accumulation_steps = 2;
  };
  const auto divided = [&](auto& c) {
    lanes(c);
    c.parallel.strategy = "fsdp";
  };
  const auto in_lanes = made(1, lanes);
  EXPECT_EQ(made(2, lanes), in_lanes);
  for (const int ranks : {2, 3}) EXPECT_EQ(made(ranks, divided), in_lanes);
}

TEST(LanguageRun, TargetsThatDoNotCountAreInNoMean) {
  const Folder folder;
  auto config = small_run(corpus(folder), folder / "run");
  config.data.tokens.mask_boundaries = true;
  config.training.sample = {};
  config.training.metrics = {"perplexity"};
  printed(2, config);
  const auto metrics = result(config)["metrics"];
  EXPECT_NEAR(std::exp(metrics["loss"].get<double>()), metrics["perplexity"], 1e-4);
  auto net = models::load_transformer(folder / "run/model");
  const data::TokenDataset all(config.data.path, {.sequence_length = 24, .mask_boundaries = true});
  const auto part = static_cast<int64_t>(std::llround(0.1 * static_cast<double>(all.size())));
  double sum = 0, targets = 0;
  const at::NoGradGuard no_grad;
  for (int64_t i = all.size() - part; i < all.size(); ++i) {
    const std::vector<int64_t> index = {i};
    const auto batch = all.get_batch(index);
    const auto counted = batch.target.ne(-100).sum().item<double>();
    sum += net->forward(batch.data, batch.target).item<double>() * counted;
    targets += counted;
  }
  EXPECT_NEAR(metrics["loss"], sum / targets, 1e-5);
}

// Documents of nothing are separators alone, none of which is a target.
TEST(LanguageRun, SequencesWithoutATargetChangeNothing) {
  const Folder folder;
  const std::string path = folder / "corpus";
  {
    text::TokenWriter writer(path, {.vocabulary = 16, .separator = 0});
    for (int i = 0; i < 40; ++i) {
      writer.add(std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7});
      for (int more = i % 4 == 0 ? 20 : 0; more > 0; --more) writer.add({});
    }
    writer.finish();
  }
  const data::TokenDataset all(path, {.sequence_length = 8, .mask_boundaries = true});
  int64_t empty = 0;
  for (int64_t i = 0; i < all.size(); ++i)
    empty += all.get_batch(i).target.eq(-100).all().item<bool>();
  ASSERT_GT(empty, 10);
  ASSERT_GT(all.size(), 2 * empty);

  auto config = small_run(path, folder / "alone");
  config.model.transformer.max_length = 8;
  config.data.tokens.sequence_length = 8;
  config.data.tokens.mask_boundaries = true;
  config.data.validation_fraction = 0;
  config.data.validation_path = path;
  config.optimizer.kind = "sgd";  // whose gradients of rounding stay small
  config.training.sample.prompt = "";
  config.training.max_grad_norm = 0;
  config.training.max_steps = 30;
  config.training.eval_steps = 10;
  config.checkpoint.save_strategy = "no";
  printed(1, config);
  auto divided = config;
  divided.training.batch_size = 1;
  divided.logging.output_dir = folder / "divided";
  printed(2, divided);
  auto accumulated = config;
  accumulated.training.batch_size = 1;
  accumulated.training.gradient_accumulation_steps = 2;
  accumulated.logging.output_dir = folder / "accumulated";
  printed(1, accumulated);
  for (const auto& other : {divided, accumulated}) {
    EXPECT_NEAR(result(other)["train_loss"], result(config)["train_loss"].get<double>(), 1e-5);
    EXPECT_NEAR(result(other)["metrics"]["loss"], result(config)["metrics"]["loss"].get<double>(),
                1e-5);
    EXPECT_EQ(result(other)["skipped"], result(config)["skipped"]);
  }

  // One sequence a step: without a target it makes no update.
  config.training.batch_size = 1;
  config.training.max_steps = 0;
  config.training.epochs = 1;
  config.optimizer.kind = "adamw";
  config.logging.output_dir = folder / "single";
  printed(1, config);
  EXPECT_EQ(result(config)["skipped"], empty);
  auto lanes = config;
  for (const int ranks : {1, 2}) {
    lanes.parallel.lanes = 2;
    lanes.logging.output_dir = folder / ("lanes" + std::to_string(ranks));
    printed(ranks, lanes);
  }
  EXPECT_EQ(contents(folder / "lanes1/model/model.safetensors"),
            contents(folder / "lanes2/model/model.safetensors"));
}

TEST(LanguageRun, WhatDoesNotFitIsSaidBeforeItBegins) {
  const Folder folder;
  const std::string data = corpus(folder);
  const auto refused = [&](const std::function<void(RunConfig&)>& change) {
    auto config = small_run(data, folder / "none");
    change(config);
    const Folder said;
    spawn_bare(1,
               [&](int) { test::write(said / "what", message_of([&] { train::run(config); })); });
    return contents(said / "what");
  };
  EXPECT_THAT(refused([](auto& c) { c.model.transformer.vocabulary = 100; }),
              HasSubstr("a vocabulary of 100, and the data have"));
  EXPECT_THAT(refused([](auto& c) { c.data.tokens.tokenizer = "/none.json"; }),
              HasSubstr("/none.json"));
  std::vector<text::AddedToken> many;
  for (int i = 0; i < 200; ++i) many.push_back({"<|" + std::to_string(i) + "|>"});
  text::train_tokenizer(std::vector<std::string_view>{}, {.vocabulary = 456, .added = many})
      .save(folder / "other.json");
  EXPECT_THAT(refused([&](auto& c) {
                c.data.tokens.tokenizer = folder / "other.json";
                c.training.sample.prompt = "<|199|>";
              }),
              HasSubstr("training.sample.prompt has the token 455, and the model's vocabulary is"));
  EXPECT_THAT(refused([](auto& c) { c.training.sample.max_new_tokens = 47; }),
              HasSubstr("more than the model's max_length 48"));
  EXPECT_THAT(refused([](auto& c) {
                c.data.path += "/00000.bin";
                c.training.sample = {};
              }),
              HasSubstr("nothing says how many tokens there are"));
  EXPECT_THAT(refused([](auto& c) {
                c.parallel.strategy = "fsdp";
                c.parallel.fsdp.offload_folder = "/nowhere/at/all";
              }),
              HasSubstr("offload_folder '/nowhere/at/all'"));
  EXPECT_THAT(
      refused([](auto& c) {
        c.parallel.strategy = "fsdp";
        c.parallel.fsdp.transformer_layer_cls_to_wrap = {"BertLayer"};
      }),
      AllOf(HasSubstr("transformer_layer_cls_to_wrap: [fsdp] no module of type 'BertLayer'"),
            HasSubstr("TransformerBlock")));
}

}  // namespace
}  // namespace lockstep

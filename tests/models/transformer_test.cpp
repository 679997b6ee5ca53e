#include "lockstep/models/transformer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>
#include <span>

#include "lockstep/checkpoint/interchange.h"
#include "lockstep/core/error.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/generate.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/call.h"
#include "models/sampling.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "text/files.h"

namespace lockstep::test {
namespace {

using models::generate;
using models::GenerateOptions;
using models::load_transformer;
using models::parameter_count;
using models::save_transformer;
using models::Transformer;
using models::TransformerOptions;
using testing::ElementsAre;
using testing::HasSubstr;

using Ids = std::vector<int32_t>;

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

Transformer small(double dropout = 0) {
  torch::manual_seed(3);
  return Transformer({.vocabulary = 50,
                      .layers = 2,
                      .hidden = 32,
                      .heads = 4,
                      .kv_heads = 2,
                      .max_length = 64,
                      .initial_deviation = 0.2,
                      .dropout = dropout});
}

at::Tensor some_ids(int64_t rows, int64_t length) {
  return torch::arange(rows * length).mul(7).remainder(50).view({rows, length});
}

void run_python(const char* what, const std::string& folder) {
  const std::string command = fmt::format(
      "{} {}/tests/models/transformer_peer.py {} {} 2>{}/errors || (cat {}/errors; false)",
      LOCKSTEP_PEERS_PYTHON, LOCKSTEP_SOURCE_DIR, what, folder, folder, folder);
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

Ids row(const at::Tensor& ids, int64_t i, int64_t begin, int64_t end) {
  const at::Tensor part = ids[i].slice(0, begin, end).to(at::kInt).contiguous();
  return {part.const_data_ptr<int32_t>(), part.const_data_ptr<int32_t>() + part.numel()};
}

void expect_as_transformers(const std::string& folder, const std::string& name) {
  SCOPED_TRACE(name);
  const auto expected = read_tensors(folder + "/" + name + "/expected.safetensors");
  Transformer net = load_transformer(folder + "/" + name);
  const at::Tensor& ids = expected.at("ids");
  const at::Tensor logits = net->forward(ids);
  EXPECT_LE(distance(logits, expected.at("logits")), 1e-4);
  EXPECT_TRUE(at::equal(logits.argmax(-1), expected.at("logits").argmax(-1)));

  const at::Tensor loss = net->forward(ids.slice(1, 0, 11), ids.slice(1, 1));
  EXPECT_LE(distance(loss, expected.at("loss")), 1e-5);
  loss.backward();
  size_t gradients = 0;
  for (const auto& item : net->named_parameters()) {
    ASSERT_TRUE(expected.contains("grad." + item.key())) << item.key();
    EXPECT_LE(distance(item.value().grad(), expected.at("grad." + item.key())), 1e-5) << item.key();
    ++gradients;
  }
  EXPECT_EQ(gradients + 6, expected.size());

  for (const bool cached : {true, false}) {
    const GenerateOptions options{.max_new_tokens = 12, .cached = cached};
    const auto texts = generate(net, {row(ids, 0, 0, 8), row(ids, 1, 0, 8)}, options);
    const auto padded = generate(net, {row(ids, 0, 4, 12), row(ids, 1, 0, 12)}, options);
    for (int64_t i = 0; i < 2; ++i) {
      EXPECT_EQ(texts[static_cast<size_t>(i)], row(expected.at("greedy"), i, 8, 20));
      EXPECT_EQ(padded[static_cast<size_t>(i)], row(expected.at("padded"), i, 12, 24));
    }
  }
  save_transformer(net, folder + "/" + name + "/ours",
                   {.max_shard_bytes = name == "sharded" ? 120'000 : 5'000'000, .stop = {2, 5}});
  const std::string config = text::read_file(folder + "/" + name + "/ours/config.json");
  EXPECT_EQ(models::transformer_options(config), net->options);
  net->to(at::kBFloat16);
  const at::NoGradGuard no_grad;
  EXPECT_LE((net->forward(ids).to(at::kFloat) - expected.at("bf16")).abs().mean().item<double>(),
            0.05);
}

TEST(TransformerPeer, LogitsGradientsTextsAndFilesAreThoseOfTransformers) {
  isolated([] {
    const Folder folder;
    run_python("make", folder.path());
    for (const char* name : {"tied", "untied", "sharded"})
      expect_as_transformers(folder.path(), name);
    run_python("check", folder.path());
  });
}

TEST(Transformer, ParametersAreThoseOfThePublishedSizes) {
  const auto qwen = [](int64_t hidden, int64_t within, int64_t layers, int64_t heads) {
    return parameter_count({.vocabulary = 151'936,
                            .layers = layers,
                            .hidden = hidden,
                            .feed_forward = within,
                            .heads = heads,
                            .kv_heads = 8,
                            .head_dim = 128});
  };
  EXPECT_EQ(qwen(1024, 3072, 28, 16), 596'049'920);
  EXPECT_EQ(qwen(2048, 6144, 28, 16), 1'720'574'976);
  EXPECT_EQ(qwen(2560, 9728, 36, 32), 4'022'468'096);
  isolated([] {
    int64_t count = 0;
    for (const auto& parameter : small()->parameters()) count += parameter.numel();
    EXPECT_EQ(count, parameter_count(small()->options));
  });
}

TEST(Transformer, ItsCopyIsAnother) {
  isolated([] {
    const Transformer net = small();
    const auto copy = std::dynamic_pointer_cast<models::TransformerImpl>(net->clone());
    const at::Tensor ids = some_ids(2, 9);
    EXPECT_TRUE(at::equal(copy->forward(ids), net.ptr()->forward(ids)));
    const at::NoGradGuard no_grad;
    copy->model->embed_tokens->weight.zero_();
    EXPECT_FALSE(at::equal(copy->forward(ids), net.ptr()->forward(ids)));
  });
}

TEST(Transformer, WhatCannotBeIsRefused) {
  const auto refused = [](const TransformerOptions& options) {
    return message_of<ConfigError>([&] { parameter_count(options); });
  };
  EXPECT_THAT(refused({}), HasSubstr("vocabulary = 0"));
  EXPECT_THAT(refused({.vocabulary = 5, .hidden = 10, .heads = 4}), HasSubstr("give head_dim"));
  EXPECT_THAT(refused({.vocabulary = 5, .heads = 4, .kv_heads = 3}), HasSubstr("kv_heads = 3"));
  EXPECT_THAT(refused({.vocabulary = 5, .head_dim = 3}), HasSubstr("head_dim = 3"));
  isolated([] {
    Transformer net = small();
    EXPECT_THAT(message_of<ConfigError>([&] { net->forward(some_ids(1, 65)); }),
                HasSubstr("max_length is 64"));
    EXPECT_THAT(message_of<ConfigError>([&] { net->forward(some_ids(1, 3).to(at::kInt)); }),
                HasSubstr("int64"));
    EXPECT_THAT(message_of<ConfigError>([&] { net->forward(some_ids(1, 3), some_ids(1, 3) + 40); }),
                HasSubstr("outside the vocabulary of 50"));
    EXPECT_THAT(message_of<ConfigError>([&] { generate(net, {{}}); }),
                HasSubstr("prompt 0 is empty"));
    EXPECT_THAT(message_of<ConfigError>([&] { generate(net, {{1}}, {.max_new_tokens = 64}); }),
                HasSubstr("max_length = 64"));
    EXPECT_THAT(message_of<ConfigError>([&] { generate(net, {{50}}, {.max_new_tokens = 3}); }),
                HasSubstr("token 50"));
    EXPECT_THAT(message_of<ConfigError>([&] { generate(net, {{1}}, {.top_p = 0}); }),
                HasSubstr("top_p = 0"));
  });
}

TEST(Pretrained, AnotherModelIsRefusedByName) {
  const std::string config =
      R"({"model_type": "qwen3", "vocab_size": 5, "num_hidden_layers": 1, "hidden_size": 8,
      "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 4, "max_position_embeddings": 9, )";
  const auto refused = [&](const std::string& more) {
    return message_of<ConfigError>(
        [&] { models::transformer_options(config + more + "}", "c.json"); });
  };
  EXPECT_EQ(models::transformer_options(config + R"("rope_theta": 5000})").rope_theta, 5000);
  EXPECT_EQ(models::transformer_options(
                config + R"("rope_parameters": {"rope_theta": 7, "rope_type": "default"}})")
                .rope_theta,
            7);
  EXPECT_THAT(refused(R"("model_type": "qwen3_moe")"),
              HasSubstr("c.json: model_type is \"qwen3_moe\""));
  EXPECT_THAT(refused(R"("rope_scaling": {"type": "yarn", "factor": 4})"), HasSubstr("\"yarn\""));
  EXPECT_THAT(refused(R"("attention_bias": true)"), HasSubstr("attention_bias is true"));
  EXPECT_THAT(refused(R"("layer_types": ["sliding_attention"])"), HasSubstr("sliding_attention"));
  EXPECT_THAT(refused(R"("hidden_size": "8")"),
              HasSubstr("hidden_size is \"8\", not a whole number"));
}

TEST(Pretrained, ATiedHeadThatIsStoredMustBeTheEmbedding) {
  isolated([] {
    const Folder folder;
    Transformer net = small();
    save_transformer(net, folder.path());
    for (const bool equal : {true, false}) {
      net->lm_head = net->register_module(
          "lm_head", torch::nn::Linear(torch::nn::LinearOptions(32, 50).bias(false)));
      net->lm_head->weight.set_data(net->model->embed_tokens->weight.detach() + (equal ? 0 : 1));
      checkpoint::save_safetensors(net, folder.path());
      net->unregister_module("lm_head");
      if (equal) {
        EXPECT_TRUE(at::equal(load_transformer(folder.path())->forward(some_ids(1, 4)),
                              net->forward(some_ids(1, 4))));
      } else {
        EXPECT_THAT(message_of<CheckpointError>([&] { load_transformer(folder.path()); }),
                    HasSubstr("lm_head.weight is not"));
      }
    }
  });
}

TEST(Pretrained, NoOlderTokensEndItsTexts) {
  isolated([] {
    const Folder folder;
    save_transformer(small(), folder.path(), {.stop = {2}});
    save_transformer(small(), folder.path());
    EXPECT_FALSE(std::filesystem::exists(folder / "generation_config.json"));
  });
}

TEST(Generate, ASampleDependsOnSeedNumberAndPositionAlone) {
  isolated([] {
    Transformer net = small();
    const GenerateOptions options{
        .max_new_tokens = 20, .temperature = 1.2, .top_k = 30, .top_p = 0.95, .seed = 9};
    const std::vector<Ids> prompts = {{1, 2, 3}, {4}, {5, 6, 7, 8, 9}};
    const auto together = generate(net, prompts, options);
    for (size_t i = 0; i < 3; ++i) {
      auto alone = options;
      alone.first_sample = static_cast<int64_t>(i);
      EXPECT_EQ(generate(net, {prompts[i]}, alone)[0], together[i]);
      alone.cached = false;
      EXPECT_EQ(generate(net, {prompts[i]}, alone)[0], together[i]);
    }
    auto other = options;
    other.seed = 10;
    EXPECT_NE(generate(net, prompts, other), together);
    EXPECT_TRUE(net->is_training());
  });
}

TEST(Generate, EndsAtAStopAndTheOthersGoOn) {
  isolated([] {
    Transformer net = small();
    const std::vector<Ids> prompts = {{1, 2, 3}, {4}, {5, 6, 7}};
    const GenerateOptions options{.max_new_tokens = 15, .temperature = 1, .seed = 1};
    const auto whole = generate(net, prompts, options);
    auto stopped = options;
    stopped.stop = {whole[1][4]};
    std::vector<Ids> heard(3);
    stopped.on_token = [&](size_t prompt, int32_t token) { heard[prompt].push_back(token); };
    const auto texts = generate(net, prompts, stopped);
    for (size_t i = 0; i < 3; ++i) {
      const auto end = std::find(whole[i].begin(), whole[i].end(), whole[1][4]);
      EXPECT_EQ(texts[i], Ids(whole[i].begin(), end == whole[i].end() ? end : end + 1));
    }
    EXPECT_EQ(heard, texts);
    // Modes are put back, of frozen layers too.
    const auto frozen = net->model->block(0);
    frozen->eval();
    generate(net, prompts, options);
    EXPECT_TRUE(net->is_training());
    EXPECT_FALSE(frozen->is_training());
    auto endless = options;
    endless.max_new_tokens = std::numeric_limits<int64_t>::max();
    EXPECT_THAT(message_of<ConfigError>([&] { generate(net, prompts, endless); }),
                HasSubstr("are more than max_length"));
    auto few = options;
    few.vocabulary = 5;
    few.temperature = 100;
    std::set<int32_t> drawn;
    for (const auto& text : generate(net, prompts, few)) drawn.insert(text.begin(), text.end());
    EXPECT_THAT(drawn, ElementsAre(0, 1, 2, 3, 4));
  });
}

// Against all of them sorted.
TEST(Generate, DrawsFromTheLeastSetOfTheMostLikely) {
  isolated([] {
    torch::manual_seed(4);
    const std::vector<std::pair<int64_t, double>> settings = {
        {0, 0.3}, {0, 0.999}, {20, 1}, {20, 0.6}, {2000, 0.9}};
    for (const int64_t n : {1, 50, 3000}) {
      for (const double width : {0.0, 0.1, 5.0}) {
        const at::Tensor logits = (torch::randn({n}) * width * 4).round() / 4;  // some are equal
        const std::span row(logits.const_data_ptr<float>(), static_cast<size_t>(n));
        const at::Tensor chances = logits.to(at::kDouble).softmax(0);
        const at::Tensor order = std::get<1>(logits.sort(true, 0, true));
        for (const auto& [k, p] : settings) {
          const int64_t most = k == 0 ? n : std::min(k, n);
          const at::Tensor likely = chances.index_select(0, order.slice(0, 0, most));
          const at::Tensor before = likely.cumsum(0) - likely;
          const int64_t kept = (before < p * likely.sum() - 1e-9).sum().item<int64_t>();
          const at::Tensor set = std::get<0>(order.slice(0, 0, std::max<int64_t>(kept, 1)).sort());
          const GenerateOptions options{.temperature = 1, .top_k = k, .top_p = p};
          EXPECT_EQ(models::sample_token(row, options, 0), set[0].item<int64_t>());
          EXPECT_EQ(models::sample_token(row, options, 1 - 1e-12), set[-1].item<int64_t>());
        }
      }
    }
  });
}

TEST(Generate, ADamagedModelIsNamed) {
  isolated([] {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const std::vector<GenerateOptions> all = {
        {.temperature = 0}, {.temperature = 1}, {.temperature = 1, .top_k = 2, .top_p = .5}};
    for (const auto& options : all) {
      for (const float damaged : {std::nanf(""), infinity}) {
        const std::vector<float> row = {1, damaged, 2};
        EXPECT_THAT(message_of<Error>([&] { models::sample_token(row, options, .5); }),
                    testing::HasSubstr("1 of 3 logits are NaN or infinite"));
      }
      const std::vector<float> masked = {-infinity, -infinity, 2}, none(3, -infinity);
      EXPECT_EQ(models::sample_token(masked, options, 0), 2);
      EXPECT_THAT(message_of<Error>([&] { models::sample_token(none, options, .5); }),
                  testing::HasSubstr("3 of 3 logits are NaN or infinite"));
    }
  });
}

// Of 1e-46 float32 makes 0, of 1e39 infinity.
TEST(Generate, DrawsAtTemperaturesBeyondFloat32) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::vector<float> row = {2, 3, 3, 1, -std::numeric_limits<float>::infinity()};
  const auto drawn = [&](double temperature, double draw) {
    return models::sample_token(row, {.temperature = temperature, .top_k = 4}, draw);
  };
  for (const double cold : {1e-300, 1e-46, 1e-39}) {
    EXPECT_EQ(drawn(cold, 0.4), 1);
    EXPECT_EQ(drawn(cold, 0.9), 2);
  }
  for (const double hot : {1e38, 1e39, infinity}) {
    EXPECT_EQ(drawn(hot, 0.1), 0);
    EXPECT_EQ(drawn(hot, 0.9), 3);
  }
}

TEST(CrossEntropy, IsThatOfAllLogitsInChunksOfAnySize) {
  isolated([] {
    torch::manual_seed(1);
    const at::Tensor hidden = torch::randn({3, 7, 8}, at::kDouble).set_requires_grad(true);
    const at::Tensor weight = torch::randn({11, 8}, at::kDouble).set_requires_grad(true);
    at::Tensor targets = torch::randint(0, 11, {3, 7});
    targets[1].slice(0, 2, 5).fill_(-100);
    for (const bool mean : {true, false}) {
      const auto whole = torch::nn::functional::cross_entropy(
          at::linear(hidden, weight).view({21, 11}), targets.view({21}),
          mean ? torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kMean)
               : torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      const auto expected = torch::autograd::grad({whole * 3}, {hidden, weight});
      for (const int64_t chunk : {0, 1, 5, 100}) {
        const at::Tensor loss =
            models::cross_entropy(hidden, weight, targets, {.chunk = chunk, .mean = mean});
        EXPECT_LE(distance(loss, whole), 1e-12);
        const auto gradients = torch::autograd::grad({loss * 3}, {hidden, weight});
        EXPECT_LE(distance(gradients[0], expected[0]), 1e-12);
        EXPECT_LE(distance(gradients[1], expected[1]), 1e-12);
      }
      const at::NoGradGuard no_grad;
      EXPECT_LE(distance(models::cross_entropy(hidden, weight, targets, {.mean = mean}), whole),
                1e-12);
    }
    // A frozen weight, as of a head that is not trained.
    const auto loss = models::cross_entropy(hidden, weight.detach(), targets);
    EXPECT_TRUE(torch::autograd::grad({loss}, {hidden})[0].defined());
  });
}

// An entry of the vocabulary that is the target at no position has a gradient of about 1 / (8192 x
// 8192) of each hidden value, which is 0 in float16.
// As torch has it: a batch of prompts alone moves nothing.
TEST(CrossEntropy, OfNoTargetIsNanWithGradientsOfZero) {
  const at::Tensor hidden = torch::randn({4, 8}).set_requires_grad(true);
  const at::Tensor weight = torch::randn({11, 8}).set_requires_grad(true);
  const auto loss = models::cross_entropy(hidden, weight, torch::full({4}, -100, at::kLong));
  loss.backward();
  EXPECT_TRUE(std::isnan(loss.item<double>()));
  for (const at::Tensor& tensor : {hidden, weight}) {
    EXPECT_TRUE(at::equal(tensor.grad(), at::zeros_like(tensor)));
  }
}

TEST(CrossEntropy, ASecondDerivativeIsRefused) {
  const at::Tensor hidden = torch::randn({4, 8}).set_requires_grad(true);
  const auto loss =
      models::cross_entropy(hidden, torch::randn({11, 8}), torch::zeros({4}, at::kLong));
  EXPECT_THAT(
      message_of<ConfigError>([&] { torch::autograd::grad({loss}, {hidden}, {}, {}, true); }),
      HasSubstr("no second derivative"));
}

TEST(CrossEntropy, GradientsOfAnAutocastInFloat16DoNotVanish) {
  isolated([] {
    torch::manual_seed(1);
    const at::Tensor hidden = (torch::randn({8192, 8}) + 1).set_requires_grad(true);
    const at::Tensor weight = (torch::randn({8192, 8}) / 8).set_requires_grad(true);
    const at::Tensor targets = torch::randint(0, 100, {8192});
    const auto gradients = [&](at::ScalarType dtype, double scale) {
      at::Tensor loss;
      {
        const Autocast autocast(at::kCPU, dtype);
        loss = models::cross_entropy(hidden, weight, targets);
      }
      return torch::autograd::grad({loss * scale}, {hidden, weight});
    };
    const auto expected = gradients(at::kFloat, 1), halves = gradients(at::kHalf, 65536);
    const auto error = [](const at::Tensor& got, const at::Tensor& want) {
      return ((got / 65536 - want).norm() / want.norm()).item<double>();
    };
    EXPECT_EQ(halves[1].scalar_type(), at::kFloat);
    EXPECT_LE(error(halves[0], expected[0]), 2e-2);
    EXPECT_LE(error(halves[1], expected[1]), 2e-2);
    EXPECT_LE(error(halves[1].slice(0, 100), expected[1].slice(0, 100)), 2e-2);
  });
}

// Sums over many chunks, which are wider than the weight.
TEST(CrossEntropy, ManyChunksAddUpInFloat32) {
  isolated([] {
    torch::manual_seed(1);
    const at::Tensor hidden = torch::ones({4096, 4}).to(at::kBFloat16).set_requires_grad(true);
    const at::Tensor weight = torch::zeros({2, 4}).to(at::kBFloat16).set_requires_grad(true);
    const auto loss = models::cross_entropy(hidden, weight, torch::zeros({4096}, at::kLong),
                                            {.chunk = 1, .mean = false});
    const auto gradients = torch::autograd::grad({loss}, {hidden, weight});
    EXPECT_EQ(gradients[1].scalar_type(), at::kBFloat16);
    EXPECT_EQ(gradients[1][0][0].item<double>(), -2048);  // bfloat16 stops at -128
  });
}

}  // namespace
}  // namespace lockstep::test

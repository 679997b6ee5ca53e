#include "train/run/language_model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/models/generate.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/call.h"
#include "lockstep/text/tokenizer.h"
#include "lockstep/text/utf8.h"
#include "lockstep/train/metrics.h"

namespace lockstep::train {
namespace {

constexpr int64_t kIgnored = -100;  // a target that does not count

int64_t targets_of(const data::Batch& batch) {
  return batch.target.ne(kIgnored).sum().item<int64_t>();
}

text::Tokenizer tokenizer_of(const RunData& data) {
  if (!data.tokenizer.empty()) return text::Tokenizer::from_file(data.tokenizer);
  throw ConfigError(
      "[run] training.sample.prompt needs a tokenizer, and the data have none beside them: give "
      "data.tokenizer");
}

void refuse_foreign_tokens(const at::Tensor& tokens, models::Transformer net) {
  const int64_t known = net->options.vocabulary;
  if (tokens.numel() == 0) return;
  for (const int64_t one : {tokens.min().item<int64_t>(), tokens.max().item<int64_t>()}) {
    if (one >= 0 && one < known) continue;
    throw ConfigError(fmt::format(
        "[run] data.path has the token {}, and the model's vocabulary is {}: give a larger "
        "model.vocabulary, or the data.dtype in which the file was written",
        one, known));
  }
}

// What is said of a token that is not known names neither.
at::Tensor loss_of(const models::Transformer& net, const data::Batch& batch) {
  try {
    return parallel::call(net, batch.data, batch.target);
  } catch (const std::exception&) {
    if (batch.data.is_cpu()) {
      refuse_foreign_tokens(batch.data, net);
      refuse_foreign_tokens(batch.target.masked_select(batch.target.ne(kIgnored)), net);
    }
    throw;
  }
}

// What a file of tokens puts after each document.
std::optional<int32_t> end_of_documents(const RunData& data, const text::Tokenizer& tokenizer) {
  if (data.separator) return static_cast<int32_t>(*data.separator);
  return tokenizer.id_of("<|endoftext|>");
}

}  // namespace

models::Transformer language_model(const RunConfig& config, const Model& model) {
  const auto& training = config.training;
  auto net = std::dynamic_pointer_cast<models::TransformerImpl>(model.shared());
  if (net == nullptr) {
    const char* const key = training.activation_checkpointing != "none"
                                ? "training.activation_checkpointing"
                            : !training.sample.prompt.empty() ? "training.sample.prompt"
                                                              : nullptr;
    if (key == nullptr) return nullptr;
    throw ConfigError(
        fmt::format("[run] {} is for a models::Transformer, and model.kind {} is none", key,
                    config.model.kind));
  }
  return net;
}

bool is_next_token(const std::string& loss) { return loss == "auto" || loss == "cross_entropy"; }

void refuse_foreign_tokens(const RunConfig& config, const RunData& data, models::Transformer net) {
  constexpr int64_t kLooked = 64;
  if (config.data.kind != "tokens") return;
  std::vector<int64_t> first(static_cast<size_t>(std::min(data.training->size(), kLooked)));
  std::iota(first.begin(), first.end(), 0);
  refuse_foreign_tokens(data.training->get_batch(first).data, std::move(net));
}

std::optional<parallel::ActivationCheckpointing> recomputed_blocks(const RunConfig& config,
                                                                   models::Transformer net) {
  const std::string& what = config.training.activation_checkpointing;
  if (what == "none") return std::nullopt;
  return parallel::ActivationCheckpointing(
      net->recomputed(what == "full" ? models::Recomputed::Full : models::Recomputed::Selective));
}

LossOfBatch next_token_loss(models::Transformer net) {
  return [net = std::move(net)](const data::Batch& batch) { return loss_of(net, batch); };
}

void measure_language(TrainerOptions& options, const RunConfig& config, models::Transformer net) {
  // Sequences of a data set of tokens have equally many targets, unless some are masked.
  if (config.data.kind != "tokens" || config.data.tokens.mask_boundaries) {
    options.count = targets_of;
  }
  if (!options.evaluation.data) return;
  options.evaluation.measure = [net = std::move(net),
                                metrics = options.evaluation.metrics](const data::Batch& batch) {
    const double loss = loss_of(net, batch).item<double>();
    at::Tensor logits;
    for (const auto& metric : metrics) {
      if (auto* const perplexity = dynamic_cast<Perplexity*>(metric.get())) {
        perplexity->update(loss, targets_of(batch));
        continue;
      }
      if (!logits.defined()) logits = parallel::call(net, batch.data).flatten(0, 1);
      metric->update(logits, batch.target.flatten());
    }
    return std::map<std::string, double>{{"loss", loss}};
  };
}

Samples::Samples(const RunConfig& config, const RunData& data, models::Transformer net,
                 std::shared_ptr<ProgressDisplay> display, std::shared_ptr<Monitoring> log)
    : config_(config.training.sample),
      seed_(static_cast<uint64_t>(config.training.seed)),
      tokenizer_(tokenizer_of(data)),
      stop_(end_of_documents(data, tokenizer_)),
      net_(std::move(net)),
      display_(std::move(display)),
      log_(std::move(log)) {
  const auto ids = tokenizer_.encode(config_.prompt);
  const int32_t most = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
  if (most >= net_->options.vocabulary) {
    throw ConfigError(
        fmt::format("[run] training.sample.prompt has the token {}, and the model's vocabulary is "
                    "{}: give the tokenizer of the data as data.tokenizer",
                    most, net_->options.vocabulary));
  }
  const auto prompt = static_cast<int64_t>(ids.size());
  if (config_.max_new_tokens > net_->options.max_length - prompt) {
    throw ConfigError(fmt::format(
        "[run] training.sample: the prompt has {} tokens; with max_new_tokens {} that is more than "
        "the model's max_length {}",
        prompt, config_.max_new_tokens, net_->options.max_length));
  }
}

std::string Samples::text() {
  const auto answer = models::generate(net_, {tokenizer_.encode(config_.prompt)},
                                       {.max_new_tokens = config_.max_new_tokens,
                                        .temperature = config_.temperature,
                                        .top_k = config_.top_k,
                                        .top_p = config_.top_p,
                                        .stop = {stop_.value_or(-1)},
                                        .seed = seed_,
                                        .vocabulary = tokenizer_.size()});
  return config_.prompt + text::valid_utf8(tokenizer_.decode(answer.at(0), {.special = false}));
}

void Samples::on_evaluate(const RunState& state, Requests&) {
  const WholeParameters whole(fsdp_);
  if (!state.is_main()) return;
  const std::string written = text();
  display_->print(fmt::format("sample after step {}: {}", state.step, written));
  if (log_) log_->event("sample", written);
}

void save_language_model(const models::Transformer& net, const RunData& data,
                         const std::string& folder) {
  models::SaveTransformerOptions options;
  std::optional<text::Tokenizer> tokenizer;
  if (!data.tokenizer.empty()) {
    tokenizer = text::Tokenizer::from_file(data.tokenizer);
    if (const auto end = end_of_documents(data, *tokenizer)) options.stop = {*end};
  }
  models::save_transformer(net, folder, options);
  if (tokenizer) tokenizer->save(folder + "/tokenizer.json");
}

}  // namespace lockstep::train

// What a run of a models::Transformer has of its own: the loss of the next token, perplexity
// without all logits, and texts that the model writes.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/models/transformer.h"
#include "lockstep/parallel/activation_checkpointing.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/text/tokenizer.h"
#include "lockstep/train/config.h"
#include "lockstep/train/progress.h"
#include "lockstep/train/registry.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

// The model, where it is a transformer whose loss is its own (the library's kind, or a program's
// model of that type); an empty one otherwise. Throws ConfigError where the configuration asks
// another model for what only a transformer does.
models::Transformer language_model(const RunConfig& config, const Model& model);

// Whether training.loss of this name is a transformer's own.
bool is_next_token(const std::string& loss);

// Throws ConfigError where the first samples have tokens that the model does not know.
void refuse_foreign_tokens(const RunConfig& config, const RunData& data, models::Transformer net);

// While it lives, blocks are computed again in backward, as training.activation_checkpointing says.
std::optional<parallel::ActivationCheckpointing> recomputed_blocks(const RunConfig& config,
                                                                   models::Transformer net);

// While it lives, a rank has all parameters. Every rank makes one; null: they are there anyway.
class WholeParameters {
 public:
  explicit WholeParameters(parallel::Fsdp* fsdp) : fsdp_(fsdp) {
    if (fsdp_ != nullptr) fsdp_->unshard();
  }
  ~WholeParameters() {
    if (fsdp_ != nullptr && std::uncaught_exceptions() == exceptions_) fsdp_->reshard();
  }
  WholeParameters(const WholeParameters&) = delete;
  WholeParameters& operator=(const WholeParameters&) = delete;

 private:
  parallel::Fsdp* fsdp_;
  int exceptions_ = std::uncaught_exceptions();
};

// The mean loss of the tokens that follow.
LossOfBatch next_token_loss(models::Transformer net);

// Counts and measures by that loss. Logits are made only for metrics other than perplexity.
void measure_language(TrainerOptions& options, const RunConfig& config, models::Transformer net);

// Writes a text after each evaluation, on rank 0.
class Samples : public Callback {
 public:
  // Throws DataError for a tokenizer that cannot be read, and ConfigError where there is none.
  // `log` may be null.
  Samples(const RunConfig& config, const RunData& data, models::Transformer net,
          std::shared_ptr<ProgressDisplay> display, std::shared_ptr<Monitoring> log);

  void on_evaluate(const RunState& state, Requests& requests) override;
  // What shards the model; null: nothing does.
  void attach(parallel::Fsdp* fsdp) { fsdp_ = fsdp; }

 private:
  std::string text();

  SampleConfig config_;
  uint64_t seed_;
  text::Tokenizer tokenizer_;
  std::optional<int32_t> stop_;
  models::Transformer net_;
  std::shared_ptr<ProgressDisplay> display_;
  std::shared_ptr<Monitoring> log_;
  parallel::Fsdp* fsdp_ = nullptr;
};

// Writes a folder that Hugging Face's libraries read, on rank 0.
void save_language_model(const models::Transformer& net, const RunData& data,
                         const std::string& folder);

}  // namespace lockstep::train

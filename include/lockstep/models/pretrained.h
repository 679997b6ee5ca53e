// Transformers in Hugging Face's folders: config.json, and model.safetensors or shards of it.
//
//   auto net = lockstep::models::load_transformer("Qwen3-0.6B");
//   ...
//   lockstep::models::save_transformer(net, "my-model");     // AutoModelForCausalLM reads it
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/models/transformer.h"

namespace lockstep::models {

// The sizes in the text of a config.json, as transformers 4 and 5 write it. Throws ConfigError that
// begins with `where` for another architecture than Qwen3ForCausalLM and for anything that would
// make another forward: biases, a sliding window, scaled positions, another activation.
TransformerOptions transformer_options(std::string_view config,
                                       std::string_view where = "config.json");

// Options of load_transformer().
struct LoadTransformerOptions {
  at::ScalarType dtype = at::kFloat;  // of the parameters; files of another are converted
  double dropout = 0;                 // TransformerOptions::dropout, which files do not have
};

// The model of a folder. A head that is tied may be there again, with the same values. Communicates
// nothing: every rank calls it, or one before Ddp. Throws ConfigError and CheckpointError.
Transformer load_transformer(const std::string& folder, const LoadTransformerOptions& options = {});

// Options of save_transformer().
struct SaveTransformerOptions {
  int64_t max_shard_bytes = 5'000'000'000;
  // Tokens that end a text, for generation_config.json, which is written where there are any, and
  // else removed.
  std::vector<int32_t> stop = {};
};

// Writes the folder that transformers reads, replacing what is there. On one rank. Throws
// CheckpointError.
void save_transformer(const Transformer& net, const std::string& folder,
                      const SaveTransformerOptions& options = {});

}  // namespace lockstep::models

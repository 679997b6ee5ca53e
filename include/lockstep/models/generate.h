// Text that a transformer writes, token by token.
//
//   auto answers = lockstep::models::generate(
//       net, {tokenizer.encode("Once")},
//       {.max_new_tokens = 100, .temperature = 0.8, .seed = 1});
//   std::cout << tokenizer.decode(answers[0]);
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/models/transformer.h"

namespace lockstep::models {

// Options of generate().
struct GenerateOptions {
  int64_t max_new_tokens = 128;
  // Logits are divided by it; 0: the most likely token, of equal ones the first (greedy).
  double temperature = 0;
  int64_t top_k = 0;  // only the most likely k; 0: all
  // Of these only the most likely ones that have this much probability together; 1: all. As in
  // Hugging Face's transformers, after temperature and top_k.
  double top_p = 1;
  std::vector<int32_t> stop = {};  // a sequence ends after one of these
  // The draw for a token depends on (seed, number of the sample, position in the sequence) alone,
  // not on the other samples of the batch.
  uint64_t seed = 0;
  int64_t first_sample = 0;  // the number of the first prompt's sample
  // Only numbers below it are drawn: the tokenizer's size, where the model has more rows. 0: all,
  // as is any number beyond them.
  int64_t vocabulary = 0;
  // False computes all keys and values again for each token: slower, the same tokens.
  bool cached = true;
  // Called for each token when it is drawn, with the prompt's index, with gradients and
  // InferenceMode as generate() was called and the model in evaluation mode. It may throw, which
  // ends generate(), call generate(), and change the model.
  std::function<void(size_t prompt, int32_t token)> on_token = {};
};

// What follows each prompt: up to max_new_tokens tokens, with the one that ended it. Prompts may
// have different lengths. Without gradients, in evaluation mode, which is put back. Under Fsdp it
// is called between unshard() and reshard(), by each rank as it likes. Throws ConfigError for an
// empty prompt, a token outside the vocabulary, more tokens than max_length, or impossible options,
// and Error for a model whose logits are NaN or infinite.
std::vector<std::vector<int32_t>> generate(Transformer& net,
                                           const std::vector<std::vector<int32_t>>& prompts,
                                           const GenerateOptions& options = {});

}  // namespace lockstep::models

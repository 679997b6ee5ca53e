// Many dialogues at once between a transformer and what answers it: an environment, a user. The
// model writes a message, token by token; the answer is appended to it; and so on. Of every token
// it is recorded who wrote it, so that a model can be trained on the very tokens that it has
// written.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lockstep/models/generate.h"
#include "lockstep/models/transformer.h"

namespace lockstep::models {

// How a message of the model ended.
enum class Written {
  Complete,     // with one of the tokens of GenerateOptions::stop, which is its last
  TooLong,      // after max_new_tokens
  ContextFull,  // with the context, or the answer before it did not leave room for one
};

// The other side of one dialogue. Called from one thread.
class Dialogue {
 public:
  virtual ~Dialogue() = default;
  // The tokens before the model's first message; at least one.
  virtual std::vector<int32_t> begin() = 0;
  // The tokens between the message and the model's next one. None end the dialogue; so does
  // ContextFull, regardless of what is returned.
  virtual std::vector<int32_t> answer(std::span<const int32_t> message, Written how) = 0;
};

// A dialogue, and the numbers that its tokens are drawn by.
struct DialogueSeat {
  Dialogue* dialogue = nullptr;
  uint64_t seed = 0;  // the draw for a token depends on (seed, position) alone
};

// All tokens of a dialogue but an answer that found no room.
struct DialogueTokens {
  std::vector<int32_t> ids;
  std::vector<uint8_t> own;  // 1 where the model wrote the token
};

// Options of hold_dialogues().
struct DialogueOptions {
  // How tokens are drawn. max_new_tokens is that of a message; seed, first_sample, cached and
  // on_token are not used.
  GenerateOptions sampling = {};
  int64_t context = 1024;  // tokens of a dialogue
  int64_t rows = 64;       // dialogues that are computed together; others take the seats that end
  int64_t chunk = 1024;    // tokens of a prompt or an answer that are computed together
  // Called before each token of the messages of a turn; what it throws ends hold_dialogues().
  std::function<void()> check = {};
};

// Holds the dialogues to their ends. They proceed in turns: all messages of a turn are written
// together, then all answers are read together. Dialogues that begin with the same tokens and one
// after another, such as those of a group, have that computed once. Without gradients, in
// evaluation mode, which is put back. Dialogues and `check` are called with the model in it, and
// with gradients and InferenceMode as hold_dialogues() was called.
//
// Kernels may round differently for other batches, so the last bits of the probabilities, and a
// token in a million, depend on which dialogues are given together and on `rows`; on nothing else
// but seeds and weights. Throws ConfigError for a beginning that leaves no room in the context, a
// token of a beginning or an answer that is outside the vocabulary, a context above the model's
// max_length, and impossible options, and Error for a model whose logits are NaN or infinite.
std::vector<DialogueTokens> hold_dialogues(Transformer& net,
                                           const std::vector<DialogueSeat>& dialogues,
                                           const DialogueOptions& options);

}  // namespace lockstep::models

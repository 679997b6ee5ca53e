// A small model that knows how to talk: a tokenizer and a transformer made from scripted dialogues,
// so that reinforcement learning has something to begin with.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/models/transformer.h"
#include "lockstep/rl/rollout.h"
#include "lockstep/text/tokenizer.h"

namespace lockstep::rl {

// A scripted dialogue: which task, and all that the agent says, message by message.
struct Demonstration {
  Planned planned = {};
  std::vector<std::string> lines = {};
};
// The one of this number, the same on every rank.
using Demonstrations = std::function<Demonstration(int64_t number)>;

// Options of warm_up(), the same on all ranks.
struct WarmUpOptions {
  int64_t steps = 1000;
  int64_t batch = 16;           // dialogues a step
  double learning_rate = 2e-3;  // up over 20 steps, then down to a tenth of it
  int64_t lanes = 8;
  uint64_t seed = 42;
  int64_t vocabulary = 768;
  int64_t corpus = 600;  // dialogues that the tokenizer is made from, those of numbers 0, 1, ...
  models::TransformerOptions model = {.layers = 3,
                                      .hidden = 96,
                                      .feed_forward = 256,
                                      .heads = 4,
                                      .kv_heads = 2,
                                      .head_dim = 24,
                                      .max_length = 512,
                                      .rope_theta = 1e4};
  // Where results are kept, as folders of transformers. Empty: nowhere.
  std::string cache = {};
  std::string key = {};  // what else the dialogues depend on, for the cache
  // Called on every rank.
  std::function<void(int64_t step, double loss)> on_step = {};
};

// What a warm-up has made.
struct WarmedUp {
  models::Transformer net{nullptr};
  text::Tokenizer tokenizer;
  bool cached = false;
  double loss = 0;  // mean of the last tenth of the steps; 0 when cached
};

// The folder for such things in the user's cache: XDG_CACHE_HOME, ~/.cache, or "" without a home.
std::string cache_folder();

// A dialogue's tokens, played in `arenas`, with the script's own tokens marked. Also those after
// which the episode is over.
models::DialogueTokens demonstrated(const Demonstration& demonstration,
                                    const text::Tokenizer& tokenizer, const AgentText& text,
                                    const Arenas& arenas, const Limits& limits);

// Trains tokenizer and model, or reads them from the cache. Supervised learning with AdamW on the
// agent's tokens. Throws ConfigError on all ranks for a dialogue that is longer than the model's
// max_length. Every rank calls it; the same bits on every number of ranks up to the lanes. The
// model is on the world's device.
WarmedUp warm_up(const comm::World& world, const Demonstrations& demonstrations,
                 const AgentText& text, const Arenas& arenas, const WarmUpOptions& options);

}  // namespace lockstep::rl

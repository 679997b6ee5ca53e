// Episodes that a language model plays: many at once, token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/models/dialogues.h"
#include "lockstep/models/transformer.h"
#include "lockstep/rl/chat.h"
#include "lockstep/rl/environment.h"
#include "lockstep/rl/episode.h"
#include "lockstep/rl/user.h"
#include "lockstep/text/tokenizer.h"

namespace lockstep::rl {

// How messages become text. The stream of tokens only grows: what the model has written stays as it
// was sampled, and what it sees next is put after it.
struct AgentText {
  // Everything before the agent's first message, up to where it begins.
  std::function<std::string(const Scene& scene, std::span<const Message> seen)> prompt;
  // What stands between the <|im_end|> of a message of the agent and the beginning of its next one;
  // not empty.
  std::function<std::string(std::span<const Message> seen)> answer;
};

// The texts of prompt_text() and reply_text(), with a byte F8 after each '<' of users and tools: it
// is not part of the text, and what has it is not a control token.
AgentText chat_text(const ChatOptions& options = {});

// Where episodes of one domain are played.
struct Arena {
  std::shared_ptr<const Domain> domain;
  std::function<std::unique_ptr<UserSimulator>()> make_user;  // one an episode
};

// By the domain's name.
using Arenas = std::map<std::string, Arena>;

// One episode that is to be played. `key` is what users and tokens are drawn by: the same key and
// weights give the same episode.
struct Planned {
  TaskKey task = {};
  uint64_t key = 0;
};

// One that was.
struct Played {
  Planned planned = {};
  models::DialogueTokens tokens = {};
  std::vector<Message> log = {};  // Episode::log()
  Reward reward = {};
  End end = End::None;
  int64_t turns = 0;
  int64_t calls = 0;
  int64_t errors = 0;
  // Tokens that the model wrote.
  int64_t own_tokens() const;
};

// How far roll_out() is.
struct RolloutProgress {
  int64_t episodes = 0;  // that it was given
  int64_t over = 0;      // of them
  int64_t tokens = 0;    // that the model has written
};

// Options of roll_out().
struct RolloutOptions {
  Limits limits = {};
  double temperature = 1;  // 0: greedy
  double top_p = 1;
  int64_t rows = 64;  // episodes that are computed together
  // Called before the first message of the model, and after each.
  std::function<void(const RolloutProgress& progress)> on_message = {};
  // Called before each token, and may throw: whether another rank still waits for what is played.
  std::function<void()> check = {};
};

// Plays the episodes in the policy's own words. What is wrong with an environment ends its episode
// alone; one that is over as it begins, since its environment dies, its user ends it or what he
// says fills the context, has no tokens. All are begun before the first message is written. The
// result depends on the list, the weights and the options, on nothing else. Throws ConfigError for
// a task whose domain has no arena, an arena or text that lacks a part, an environment or user that
// is null, a reward outside [0, 1], a tokenizer without <|im_end|>, a prompt that does not fit into
// the context before the user has spoken, and a text without an answer.
std::vector<Played> roll_out(models::Transformer& net, const text::Tokenizer& tokenizer,
                             const AgentText& text, const Arenas& arenas,
                             const std::vector<Planned>& episodes, const RolloutOptions& options);

}  // namespace lockstep::rl

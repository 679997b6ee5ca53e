#include "lockstep/rl/rollout.h"

#include <fmt/format.h>

#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "rl/chat/guard.h"
#include "rl/policy/encode.h"
#include "rl/policy/markers.h"

namespace lockstep::rl {
namespace {

template <class Object>
std::unique_ptr<Object> made(std::unique_ptr<Object> object, const Planned& planned,
                             std::string_view otherwise) {
  if (object) return object;
  throw ConfigError(fmt::format("[rollout] {}: {}", name_of(planned.task), otherwise));
}

// Tells of each message.
class Watched {
 public:
  Watched(const RolloutOptions& options, size_t episodes)
      : options_(options), progress_{.episodes = static_cast<int64_t>(episodes)} {}
  void add(size_t tokens, bool is_over) {
    progress_.tokens += static_cast<int64_t>(tokens);
    progress_.over += is_over;
    tell();
  }
  void tell() const {
    if (options_.on_message) options_.on_message(progress_);
  }

 private:
  const RolloutOptions& options_;
  RolloutProgress progress_;
};

// One episode, as the dialogue that its model sees.
class EpisodeDialogue : public models::Dialogue {
 public:
  EpisodeDialogue(const Planned& planned, const Arena& arena, const text::Tokenizer& tokenizer,
                  const AgentText& text, const Limits& limits, Watched& watched)
      : planned_(planned),
        tokenizer_(&tokenizer),
        text_(&text),
        environment_(made(arena.domain->make(), planned, "Domain::make() returned no environment")),
        user_(made(arena.make_user(), planned, "Arena::make_user returned no user")),
        episode_(std::make_unique<Episode>(*environment_, *user_, limits)),
        watched_(&watched) {}

  // False when it is over with that: there is nothing that the agent could answer.
  bool starts() {
    const auto seen = episode_->begin(planned_.task, planned_.key);
    if (episode_->over()) return false;
    first_ = prompt(seen);
    const auto fits = [&](const std::vector<int32_t>& tokens) {
      return std::ssize(tokens) < episode_->limits().context;
    };
    // As a later message that leaves no room. A task that has none by itself is the caller's error.
    if (!fits(first_) && fits(prompt(episode_->scene().history))) episode_->stop(End::ContextFull);
    return !episode_->over();
  }

  std::vector<int32_t> begin() override { return std::move(first_); }

  std::vector<int32_t> answer(std::span<const int32_t> message, models::Written how) override {
    auto tokens = answer_to(message, how);
    watched_->add(message.size(), episode_->over());
    return tokens;
  }

  Played played(models::DialogueTokens tokens) {
    return {.planned = planned_,
            .tokens = std::move(tokens),
            .log = episode_->log(),
            .reward = episode_->reward(),
            .end = episode_->why(),
            .turns = episode_->turns(),
            .calls = episode_->calls(),
            .errors = episode_->errors()};
  }

 private:
  std::vector<int32_t> answer_to(std::span<const int32_t> message, models::Written how) {
    if (how == models::Written::TooLong) episode_->stop(End::TooLong);
    if (how == models::Written::ContextFull) episode_->stop(End::ContextFull);
    if (episode_->over()) return {};
    const auto seen = episode_->agent_says(tokenizer_->decode(message.first(message.size() - 1)));
    if (episode_->over()) return {};
    auto tokens = encode_chat(*tokenizer_, text_->answer(seen));
    // No tokens would end the dialogue, and the episode goes on.
    if (tokens.empty()) {
      throw ConfigError(fmt::format(
          "[rollout] {}: AgentText::answer returned no text, and the episode continues: "
          "its text is what the agent's next message begins after",
          name_of(planned_.task)));
    }
    return tokens;
  }

  std::vector<int32_t> prompt(std::span<const Message> seen) const {
    return encode_chat(*tokenizer_, text_->prompt(episode_->scene(), seen));
  }

  Planned planned_;
  const text::Tokenizer* tokenizer_;
  const AgentText* text_;
  std::unique_ptr<Environment> environment_;
  std::unique_ptr<UserSimulator> user_;
  std::unique_ptr<Episode> episode_;
  Watched* watched_;
  std::vector<int32_t> first_;  // before the agent's first message
};

}  // namespace

AgentText chat_text(const ChatOptions& options) {
  return {
      .prompt =
          [=](const Scene& scene, std::span<const Message> seen) {
            return prompt_text(scene, guarded(seen), options);
          },
      .answer = [=](std::span<const Message> seen) { return reply_text(guarded(seen), options); }};
}

int64_t Played::own_tokens() const {
  return std::accumulate(tokens.own.begin(), tokens.own.end(), int64_t{0});
}

std::vector<Played> roll_out(models::Transformer& net, const text::Tokenizer& tokenizer,
                             const AgentText& text, const Arenas& arenas,
                             const std::vector<Planned>& episodes, const RolloutOptions& options) {
  const auto end = tokenizer.id_of(kMessageEnd);
  if (!end) throw ConfigError("[rollout] the tokenizer has no <|im_end|>, which ends messages");
  if (!text.prompt || !text.answer) {
    throw ConfigError("[rollout] AgentText lacks prompt or answer");
  }
  Watched watched(options, episodes.size());
  std::vector<EpisodeDialogue> dialogues;
  dialogues.reserve(episodes.size());
  for (const auto& planned : episodes) {
    const auto arena = arenas.find(planned.task.domain);
    if (arena == arenas.end()) {
      throw ConfigError(
          fmt::format("[rollout] {}: there is no such domain", name_of(planned.task)));
    }
    if (!arena->second.domain || !arena->second.make_user) {
      throw ConfigError(fmt::format("[rollout] {}: its arena lacks the domain or make_user",
                                    name_of(planned.task)));
    }
    dialogues.emplace_back(planned, arena->second, tokenizer, text, options.limits, watched);
  }
  std::vector<models::DialogueSeat> seats;
  std::vector<size_t> seated;
  for (size_t i = 0; i < dialogues.size(); ++i) {
    if (!dialogues[i].starts()) {
      watched.add(0, true);
      continue;
    }
    seats.push_back({&dialogues[i], episodes[i].key});
    seated.push_back(i);
  }
  watched.tell();
  auto tokens =
      models::hold_dialogues(net, seats,
                             {.sampling = {.max_new_tokens = options.limits.max_new_tokens,
                                           .temperature = options.temperature,
                                           .top_p = options.top_p,
                                           .stop = {*end},
                                           .vocabulary = tokenizer.size()},
                              .context = options.limits.context,
                              .rows = options.rows,
                              .check = options.check});
  std::vector<models::DialogueTokens> of_all(dialogues.size());
  for (size_t i = 0; i < seated.size(); ++i) of_all[seated[i]] = std::move(tokens[i]);
  std::vector<Played> out;
  for (size_t i = 0; i < dialogues.size(); ++i) {
    out.push_back(dialogues[i].played(std::move(of_all[i])));
  }
  return out;
}

}  // namespace lockstep::rl

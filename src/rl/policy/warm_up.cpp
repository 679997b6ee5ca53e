#include "lockstep/rl/warm_up.h"

#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "core/hash/mix.h"
#include "lockstep/core/error.h"
#include "lockstep/core/shard.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/random.h"
#include "lockstep/rl/learner.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "rl/chat/guard.h"
#include "rl/policy/encode.h"
#include "rl/policy/markers.h"
#include "text/pattern.h"

namespace lockstep::rl {
namespace {

// A script says all of its lines, however many these are.
constexpr Limits kScripted{.max_turns = 1 << 20, .max_errors = 1 << 20};

struct Piece {
  std::string text;
  bool own = false;
};

std::vector<Piece> pieces(const Demonstration& demonstration, const AgentText& text,
                          const Arenas& arenas, const Limits& limits) {
  const Arena& arena = arenas.at(demonstration.planned.task.domain);
  const auto environment = arena.domain->make();
  const auto user = arena.make_user();
  Episode episode(*environment, *user, limits);
  const auto first = episode.begin(demonstration.planned.task, demonstration.planned.key);
  std::vector<Piece> out{{text.prompt(episode.scene(), first)}};
  for (const auto& line : demonstration.lines) {
    if (episode.over()) break;
    out.push_back({line + kMessageEnd, true});
    const auto seen = episode.agent_says(line);
    if (!episode.over()) out.push_back({text.answer(seen)});
  }
  return out;
}

// The texts without the mark, which ends one and begins the next.
std::vector<std::string> cut(const std::vector<std::string>& texts, const std::string& mark) {
  std::vector<std::string> out;
  for (const auto& text : texts) {
    size_t begin = 0;
    for (size_t at = 0; at != std::string::npos; begin = at + mark.size()) {
      at = text.find(mark, begin);
      out.push_back(text.substr(begin, at == std::string::npos ? at : at - begin));
      if (at == std::string::npos) break;
    }
  }
  return out;
}

text::Tokenizer make_tokenizer(const Demonstrations& demonstrations, const AgentText& text,
                               const Arenas& arenas, const WarmUpOptions& options) {
  std::vector<text::AddedToken> added;
  for (const char* token : {"<|endoftext|>", "<|im_start|>", kMessageEnd, "<tool_call>",
                            "</tool_call>", "<tool_response>", "</tool_response>"}) {
    added.push_back({token});
  }
  // What stands between added tokens, which must not be merged from their parts, too.
  int64_t number = 0;
  std::vector<std::string> waiting;
  const auto source = [&]() -> std::optional<std::string> {
    while (waiting.empty() && number < options.corpus) {
      std::string whole;
      for (const auto& piece : pieces(demonstrations(number++), text, arenas, kScripted)) {
        whole += unguarded(piece.text);
      }
      waiting = {whole};
      for (const auto& token : added) waiting = cut(waiting, token.content);
    }
    if (waiting.empty()) return std::nullopt;
    std::string next = std::move(waiting.back());
    waiting.pop_back();
    return next;
  };
  // Words stay apart, so that a sentence with another order of known words is made of known tokens.
  return text::train_tokenizer(source, {.vocabulary = static_cast<int32_t>(options.vocabulary),
                                        .pattern = std::string(text::kWordsPattern),
                                        .nfc = false,
                                        .added = added});
}

models::Transformer make_net(const WarmUpOptions& options, int64_t vocabulary) {
  auto sizes = options.model;
  sizes.vocabulary = vocabulary;
  models::Transformer net(sizes);
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  for (auto& named : net->named_parameters()) {
    auto& weight = named.value();
    if (weight.dim() < 2) continue;
    const auto ends_with = [&](const std::string& end) { return named.key().ends_with(end); };
    double deviation = 1 / std::sqrt(static_cast<double>(weight.size(1)));
    if (ends_with("o_proj.weight") || ends_with("down_proj.weight")) deviation /= 2;
    if (ends_with("embed_tokens.weight")) deviation = 0.02;
    weight.normal_(0, deviation, generator);
  }
  return net;
}

// Where this warm-up is kept; depends on all that it depends on.
std::string folder_of(const WarmUpOptions& o) {
  const auto& m = o.model;
  const std::string all = fmt::format(
      "3 {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", o.steps, o.batch, o.learning_rate,
      o.lanes, o.seed, o.vocabulary, o.corpus, m.layers, m.hidden, m.feed_forward, m.heads,
      m.kv_heads, m.head_dim, m.max_length, m.rope_theta, m.norm_eps, m.tied, o.key);
  return fmt::format("{}/{:016x}", o.cache, fnv1a<uint64_t>(all));
}

// Of what is read, which is all but the last token.
void check_length(const Demonstration& demonstration, const models::DialogueTokens& tokens,
                  int64_t max_length) {
  if (std::ssize(tokens.ids) - 1 <= max_length) return;
  throw ConfigError(fmt::format(
      "[warm_up] the dialogue about {} has {} tokens, and the model {} positions: give "
      "WarmUpOptions::model a larger max_length, three_domain a larger --context, or a chat format "
      "with less text",
      name_of(demonstration.planned.task), tokens.ids.size(), max_length));
}

// The parameters of `from` into `to`, which has the same sizes.
void copy(const models::Transformer& from, models::Transformer& to) {
  const at::NoGradGuard no_grad;
  const auto source = from->parameters();
  const auto target = to->parameters();
  for (size_t i = 0; i < source.size(); ++i) target[i].copy_(source[i]);
}

// In place of what could not be read, or of what another job has made meanwhile, which is the same.
void keep(const WarmedUp& made, const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;  // a cache that cannot be written to costs time, nothing else
  const std::string aside = fmt::format("{}.{}", folder, getpid()), before = aside + ".before";
  try {
    fs::create_directories(aside);
    models::save_transformer(made.net, aside);
    made.tokenizer.save(aside + "/tokenizer.json");
    fs::rename(folder, before, ignored);
    fs::rename(aside, folder, ignored);
  } catch (const std::exception&) {
  }
  fs::remove_all(aside, ignored);
  fs::remove_all(before, ignored);
}

}  // namespace

std::string cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return std::string(cache) + "/lockstep/warm_up";
  const char* home = std::getenv("HOME");
  if (home != nullptr && *home != '\0') return std::string(home) + "/.cache/lockstep/warm_up";
  return "";
}

models::DialogueTokens demonstrated(const Demonstration& demonstration,
                                    const text::Tokenizer& tokenizer, const AgentText& text,
                                    const Arenas& arenas, const Limits& limits) {
  models::DialogueTokens out;
  for (const auto& piece : pieces(demonstration, text, arenas, limits)) {
    const auto ids = encode_chat(tokenizer, piece.text);
    out.ids.insert(out.ids.end(), ids.begin(), ids.end());
    out.own.insert(out.own.end(), ids.size(), piece.own ? 1 : 0);
  }
  return out;
}

WarmedUp warm_up(const comm::World& world, const Demonstrations& demonstrations,
                 const AgentText& text, const Arenas& arenas, const WarmUpOptions& options) {
  const comm::Group& group = world.group();
  const std::string folder = options.cache.empty() ? "" : folder_of(options);
  std::string json;
  models::Transformer kept{nullptr};
  std::error_code none;
  if (world.is_main() && !folder.empty() &&
      std::filesystem::exists(folder + "/tokenizer.json", none)) {
    try {
      kept = models::load_transformer(folder);
      json = text::Tokenizer::from_file(folder).to_json();
    } catch (const std::exception&) {  // made again
      json.clear();
      kept = nullptr;
    }
  }
  json = group.broadcast_bytes(json);
  const bool cached = !json.empty();
  auto tokenizer = cached ? text::Tokenizer::from_json(json)
                          : make_tokenizer(demonstrations, text, arenas, options);
  WarmedUp out{
      .net = make_net(options, tokenizer.size()), .tokenizer = tokenizer, .cached = cached};
  out.net->to(world.device());
  if (kept) copy(kept, out.net);
  if (cached) {
    const at::NoGradGuard no_grad;
    group.broadcast(out.net->parameters()).wait();
    return out;
  }
  Learner learner(out.net, group,
                  {.use_grpo = false,
                   .group_size = 1,
                   .learning_rate = options.learning_rate,
                   .lanes = options.lanes,
                   .seed = options.seed});
  const auto own = Shard{group.rank(), group.size()}.of(options.lanes);
  for (int64_t step = 0; step < options.steps; ++step) {
    const double up = std::min(1.0, static_cast<double>(step + 1) / 20);
    const double down = 1 - 0.9 * static_cast<double>(step) / static_cast<double>(options.steps);
    learner.set_learning_rate(options.learning_rate * up * down);
    std::vector<models::DialogueTokens> batch;
    int64_t tokens = 0;
    for (int64_t i = 0; i < options.batch; ++i) {
      const auto demonstration = demonstrations(options.corpus + step * options.batch + i);
      batch.push_back(demonstrated(demonstration, out.tokenizer, text, arenas, kScripted));
      check_length(demonstration, batch.back(), options.model.max_length);
      tokens += std::count(batch.back().own.begin(), batch.back().own.end(), 1);
    }
    std::vector<std::vector<const models::DialogueTokens*>> lanes;
    for (int64_t lane = own.begin; lane < own.end; ++lane) {
      lanes.emplace_back();
      for (int64_t i = lane; i < options.batch; i += options.lanes) {
        lanes.back().push_back(&batch[static_cast<size_t>(i)]);
      }
    }
    const double loss = learner.imitate(lanes, tokens, step);
    const int64_t last = std::max<int64_t>(1, options.steps / 10);
    if (step >= options.steps - last) out.loss += loss / static_cast<double>(last);
    if (options.on_step) options.on_step(step + 1, loss);
  }
  if (world.is_main() && !folder.empty()) keep(out, folder);
  return out;
}

}  // namespace lockstep::rl

#include "rl/run/policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/files/read_file.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/metrics.h"
#include "rl/policy/markers.h"
#include "rl/run/setup.h"
#include "text/files.h"

namespace lockstep::rl {
namespace {

// The chat template (Jinja's text) of a folder of transformers; empty without one.
std::string chat_template_in(const std::string& folder) {
  const std::string own = folder + "/chat_template.jinja";
  if (may_exist(own)) return text::read_file(own);
  const std::string config = folder + "/tokenizer_config.json";
  if (!may_exist(config)) return "";
  const auto json = nlohmann::json::parse(text::read_file(config), nullptr, false);
  if (!json.is_object() || !json.contains("chat_template")) return "";
  const auto& found = json["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  // Several by name: agents have tools.
  std::string out;
  for (const auto& one : found) {
    if (!one.is_object()) continue;
    const auto name = one.value("name", nlohmann::json());
    const auto body = one.value("template", nlohmann::json());
    if (!body.is_string()) continue;
    if (name == "tool_use" || (name == "default" && out.empty())) out = body.get<std::string>();
  }
  return out;
}

}  // namespace

ChatFormat chat_format_of(const RunOptions& options) {
  if (!options.chat_format.empty()) return chat_format(options.chat_format);
  if (options.model.empty()) return ChatFormat::Compact;
  std::string folder;
  try {
    folder = model_folder(options.model);
  } catch (const ConfigError&) {
    return ChatFormat::Qwen3;
  }
  const std::string found = chat_template_in(folder);
  return found.empty() ? ChatFormat::Qwen3 : chat_format_of_template(found);
}

WarmedUp make_policy(const comm::World& world, const Course& course, const RunOptions& options,
                     const std::string& folder, const std::function<void(std::string)>& say,
                     const std::function<void()>& each_step) {
  if (!folder.empty()) {
    models::Transformer net{nullptr};
    std::optional<text::Tokenizer> tokenizer;
    agree_on(world.group(), [&] {
      net = models::load_transformer(folder);
      tokenizer = text::Tokenizer::from_file(folder);
    });
    net->to(world.device());
    return {.net = net, .tokenizer = *tokenizer};
  }
  if (!course.demonstrate) throw ConfigError("[three_domain] --model is needed for this course");
  WarmUpOptions warm{.steps = options.warm_steps,
                     .batch = options.warm_batch,
                     .learning_rate = options.warm_lr,
                     .lanes = options.lanes,
                     .seed = static_cast<uint64_t>(options.seed)};
  warm.model.max_length = std::max(warm.model.max_length, options.context);
  warm.key = course.demonstrations_key;
  if (options.cache) warm.cache = options.cache_dir.empty() ? cache_folder() : options.cache_dir;
  warm.on_step = [&](int64_t step, double loss) {
    if (step % 100 == 0)
      say(fmt::format("warm-up step {} of {}: loss {:.3f}", step, options.warm_steps, loss));
    each_step();
  };
  auto made = warm_up(world, course.demonstrate, course.text, course.arenas, warm);
  say(made.cached ? "the warm-up was in the cache"
                  : fmt::format("warm-up: loss {:.3f}", made.loss));
  return made;
}

namespace {

// On one rank.
void export_policy(const models::Transformer& net, const text::Tokenizer& tokenizer,
                   const std::string& source, const std::string& folder) {
  models::SaveTransformerOptions options;
  for (const char* end : {kMessageEnd, "<|endoftext|>"}) {
    if (const auto id = tokenizer.id_of(end)) options.stop.push_back(*id);
  }
  models::save_transformer(net, folder, options);
  tokenizer.save(folder + "/tokenizer.json");
  if (source.empty()) return;
  for (const char* name : {"tokenizer_config.json", "chat_template.jinja", "chat_template.json",
                           "special_tokens_map.json", "generation_config.json"}) {
    const std::string from = source + "/" + name;
    if (!may_exist(from)) continue;
    text::write_file(folder + "/" + name, text::read_file(from));
  }
}

constexpr const char* kExported = "/huggingface";

}  // namespace

void StagePolicy::save(const std::string& folder, int64_t step) const {
  checkpoint::Checkpointer own(group, folder, {.retention = {.keep_last = 1}});
  learner.track_net(own);
  own.save(step);
  own.finish();
  if (!options.export_hf) return;
  learner.unshard();
  try {
    agree_on(group, [&] {
      if (group.rank() == 0) export_policy(net, tokenizer, source, folder + kExported);
    });
  } catch (const Error&) {
    learner.reshard();
    throw;
  }
  learner.reshard();
}

bool StagePolicy::is_saved(const std::string& folder) const {
  bool is_missing = false;
  agree_on(group, [&] {
    if (group.rank() != 0) return;
    is_missing = checkpoint::list_checkpoints(folder).checkpoints.empty() ||
                 (options.export_hf && !may_exist(folder + kExported + "/tokenizer.json"));
  });
  return !parallel::any_rank(is_missing, group);
}

Limits limits_of(const RunOptions& options) {
  return {
      .max_turns = options.max_turns,
      .max_errors = options.max_turns,
      .max_new_tokens = options.max_new_tokens,
      .context = options.context,
      .malformed = options.model.empty() ? Malformed::Ends : Malformed::Reported,
      .calls = {.mixed = options.mixed == "drop" ? MixedText::Drop : MixedText::Refuse,
                .parallel = options.parallel_calls ? ParallelCalls::Allow : ParallelCalls::Refuse}};
}

bool has_reference(const RunOptions& o) { return o.use_grpo && o.beta > 0; }

bool uses_fsdp(const RunOptions& o) { return o.parallel == "fsdp" || o.precision == "bf16"; }

ReferencePlace reference_place(const RunOptions& o) {
  if (o.reference == "offload") return ReferencePlace::Offloaded;
  const bool shards = o.reference == "shard" || (o.reference == "auto" && o.parallel == "fsdp");
  return shards ? ReferencePlace::Sharded : ReferencePlace::Resident;
}

LearnerOptions learner_options(const RunOptions& o, int64_t vocabulary) {
  return {.use_grpo = o.use_grpo,
          .grpo = {.clip_low = o.clip_low, .clip_high = o.clip_high, .beta = o.beta},
          .norm = o.loss_norm,
          .scale = o.scale_rewards,
          .group_size = o.group_size,
          .drop_equal_groups = o.drop_equal_groups,
          .updates = o.updates_per_rollout,
          .learning_rate = o.learning_rate,
          .max_grad_norm = o.max_grad_norm,
          .log_probs = {.temperature = o.temperature, .vocabulary = vocabulary},
          .longest = o.max_new_tokens * o.max_turns,
          .lanes = o.lanes,
          .seed = static_cast<uint64_t>(o.seed),
          .divided = o.parallel == "fsdp",
          .reference = reference_place(o),
          .reference_folder = o.output_dir,
          .narrow = o.precision == "bf16"};
}

Agreed agreed_on(const Rollout& rollout, const RunOptions& options) {
  Learnt unused;
  return agree(rollout, learner_options(options, 0), unused);
}

}  // namespace lockstep::rl

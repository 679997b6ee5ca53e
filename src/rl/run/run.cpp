#include "lockstep/rl/run.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/preemption.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/determinism.h"
#include "lockstep/parallel/metrics.h"
#include "lockstep/train/monitor.h"
#include "lockstep/train/run_history.h"
#include "lockstep/train/run_report.h"
#include "rl/run/files.h"
#include "rl/run/plan.h"
#include "rl/run/record.h"
#include "rl/run/setup.h"
#include "rl/run/state.h"

namespace lockstep::rl {
namespace {

namespace fs = std::filesystem;

class Clock {
 public:
  Clock(Seconds& seconds, const char* what) : seconds_(&seconds), what_(what) {}
  ~Clock() {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin_;
    (*seconds_)[what_] += taken.count();
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

 private:
  Seconds* seconds_;
  const char* what_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

class Run {
 public:
  Run(const comm::World& world, const Course& course, const RunOptions& given)
      : world_(world), group_(world.group()), course_(course), options_(completed(given, world)) {
    at::set_num_threads(1);  // kernels divide their sums by the number of threads
    check_alike(group_, options_.as_text());
    stages_ = plan_stages(course_, options_);
    units_ = plan_units(stages_);
    state_.ends.assign(stages_.size(), std::vector<int64_t>(16, 0));
    model_folder_ = find_model(group_, options_.model);
    options_.resume = prepare_directory(group_, options_);
  }

  RunResult run() {
    make_policy();
    check_lengths(group_, course_, stages_, *tokenizer_, options_, net_->options.max_length);
    claim_directory(group_, options_);
    Learner learner(net_, group_, learner_options());
    learner_ = &learner;
    checkpoint::Checkpointer checkpoints(group_, path("checkpoints"),
                                         {.retention = {.keep_last = 2}});
    std::string text = state_.to_json();
    learner.track(checkpoints);
    checkpoints.track("state", text);
    std::optional<checkpoint::Restored> found;
    if (options_.resume) found = checkpoints.restore_latest();
    if (found) state_ = RunState::from_json(text);
    if (world_.is_main()) {
      if (!found)
        write_whole(options_.output_dir, "curriculum.json", curriculum_json(stages_, options_));
      cut_lines(path("trajectories.jsonl"), state_.log_lines);
    }
    baselines();
    monitor_.emplace(world_, monitor_options(found.has_value()));
    say_header(found.has_value());

    const PreemptionNotice notice;
    while (state_.position < static_cast<int64_t>(units_.size())) {
      if (parallel::any_rank(notice.received(), group_)) {
        result_.preempted = true;
        break;
      }
      const Unit& unit = units_[static_cast<size_t>(state_.position)];
      const bool learns = unit.kind == Unit::Kind::Learn;
      learns ? learn(unit) : evaluate(unit);
      ++state_.position;
      if (unit.ends_stage) end_stage(unit.stage - 1);
      if (unit.ends_stage || (learns && state_.iterations % options_.save_every == 0)) {
        save(checkpoints, text);
      }
    }
    if (result_.preempted) save(checkpoints, text);
    checkpoints.finish();
    finish();
    learner_ = nullptr;
    return result_;
  }

 private:
  static RunOptions completed(RunOptions options, const comm::World& world) {
    if (options.lanes == 0) options.lanes = world.size();
    options.check();
    if (options.lanes < world.size()) {
      throw ConfigError(fmt::format("[three_domain] --lanes {} for {} ranks: each rank needs one",
                                    options.lanes, world.size()));
    }
    return options;
  }

  // Outside of its steps an Fsdp's model has no parameters.
  bool uses_fsdp() const { return options_.parallel == "fsdp" || options_.precision == "bf16"; }

  std::string path(const std::string& name) const { return options_.output_dir + "/" + name; }

  template <class... Arguments>
  void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) const {
    if (!world_.is_main() || options_.quiet) return;
    std::puts(fmt::format(format, std::forward<Arguments>(arguments)...).c_str());
    std::fflush(stdout);
  }

  void make_policy() {
    const Clock clock(seconds_, "warm_up");
    if (!options_.model.empty()) {
      std::string problem;
      try {
        net_ = models::load_transformer(model_folder_);
        tokenizer_ = text::Tokenizer::from_file(model_folder_);
      } catch (const std::exception& error) {
        problem = error.what();
      }
      agree_on(group_, problem);
      net_->to(world_.device());
      return;
    }
    if (!course_.demonstrate) throw ConfigError("[three_domain] --model is needed for this course");
    WarmUpOptions warm{.steps = options_.warm_steps,
                       .batch = options_.warm_batch,
                       .learning_rate = options_.warm_lr,
                       .lanes = options_.lanes,
                       .seed = static_cast<uint64_t>(options_.seed)};
    warm.model.max_length = std::max(warm.model.max_length, options_.context);
    warm.key = course_.demonstrations_key;
    if (options_.cache)
      warm.cache = options_.cache_dir.empty() ? cache_folder() : options_.cache_dir;
    warm.on_step = [&](int64_t step, double loss) {
      if (step % 100 == 0)
        say("warm-up step {} of {}: loss {:.3f}", step, options_.warm_steps, loss);
    };
    auto made = warm_up(world_, course_.demonstrate, course_.text, course_.arenas, warm);
    net_ = made.net;
    tokenizer_ = made.tokenizer;
    say("{}", made.cached ? "the warm-up was in the cache"
                          : fmt::format("warm-up: loss {:.3f}", made.loss));
  }

  Limits limits() const {
    return {.max_turns = options_.max_turns,
            .max_errors = options_.max_turns,
            .max_new_tokens = options_.max_new_tokens,
            .context = options_.context,
            .malformed = options_.model.empty() ? Malformed::Ends : Malformed::Reported};
  }

  LearnerOptions learner_options() const {
    const auto& o = options_;
    return {.use_grpo = o.use_grpo,
            .grpo = {.clip_low = o.clip_low, .clip_high = o.clip_high, .beta = o.beta},
            .norm = o.loss_norm,
            .scale = o.scale_rewards,
            .group_size = o.group_size,
            .drop_equal_groups = o.drop_equal_groups,
            .updates = o.updates_per_rollout,
            .learning_rate = o.learning_rate,
            .max_grad_norm = o.max_grad_norm,
            .log_probs = {.temperature = o.temperature, .vocabulary = tokenizer_->size()},
            .longest = o.max_new_tokens * o.max_turns,
            .lanes = o.lanes,
            .seed = static_cast<uint64_t>(o.seed),
            .divided = o.parallel == "fsdp",
            .narrow = o.precision == "bf16"};
  }

  train::MonitorOptions monitor_options(bool resumed) const {
    train::MonitorOptions out{.directory = options_.output_dir,
                              .every_steps = 1,
                              .name = "three_domain",
                              .total_steps = total_iterations(),
                              .resumed_at = resumed ? state_.iterations : -1,
                              .config = options_.as_text()};
    if (!uses_fsdp()) out.module = *net_;
    return out;
  }

  int64_t total_iterations() const {
    int64_t sum = 0;
    for (const auto& stage : stages_) sum += stage.iterations;
    return sum;
  }

  void baselines() {
    const Clock clock(seconds_, "baselines");
    std::string problem;
    try {
      if (world_.is_main()) gold_ = gold_of(course_, stages_);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    agree_on(group_, problem);
    for (size_t j = 0; j < stages_.size(); ++j) {
      const auto plan = plan_evaluation(stages_, options_, static_cast<int64_t>(j));
      result_.null_agent.push_back(
          scripted(course_, plan, limits(), [&](const Planned&) { return course_.idle; }));
      if (course_.oracle) {
        result_.oracle.push_back(scripted(course_, plan, limits(), course_.oracle));
      }
    }
  }

  Rollout play(const RolloutPlan& plan, double temperature, double top_p) {
    std::string why;  // an environment died, the last time
    learner_->unshard();
    auto out = run_rollout(plan, group_, [&](const std::vector<Planned>& episodes) {
      auto played = roll_out(net_, *tokenizer_, course_.text, course_.arenas, episodes,
                             {.limits = limits(), .temperature = temperature, .top_p = top_p});
      for (const auto& one : played) {
        if (one.end == End::EnvError) why = one.reward.note;
      }
      return played;
    });
    learner_->reshard();
    check_environments(out, why, group_);
    return out;
  }

  void learn(const Unit& unit) {
    const auto plan = plan_learning(stages_, options_, unit);
    Rollout rollout;
    {
      const Clock clock(seconds_, "rollout");
      rollout = play(plan, options_.temperature, options_.top_p);
    }
    CurvePoint point{
        .stage = unit.stage,
        .iteration = unit.number,
        .own_reward = reward_on(rollout, plan, stages_[static_cast<size_t>(unit.stage)].domain)};
    {
      const Clock clock(seconds_, "update");
      point.learnt = learner_->learn(rollout, state_.iterations);
    }
    state_.curve.push_back(point);
    ++state_.iterations;
    for (const auto& outcome : rollout.outcomes) {
      ++state_.ends[static_cast<size_t>(unit.stage)].at(static_cast<size_t>(outcome.end));
    }
    log(rollout, plan, unit);
    report(rollout, unit, point.learnt);
    say_iteration(unit, point.learnt);
  }

  void evaluate(const Unit& unit) {
    const Clock clock(seconds_, "evaluation");
    const auto plan = plan_evaluation(stages_, options_, unit.number);
    const auto rollout = play(plan, options_.eval_temperature, 1);
    Cell cell = cell_of(rollout, group_);
    const auto row = static_cast<size_t>(unit.stage);
    state_.rows.resize(std::max(state_.rows.size(), row + 1));
    state_.rows[row].push_back(std::move(cell));
    log(rollout, plan, unit);
    result_.rows = state_.rows;
    if (state_.rows[row].size() == stages_.size()) {
      say("{}", matrix_text(result_, stages_));
      std::map<std::string, double> metrics;
      for (size_t j = 0; j < stages_.size(); ++j) {
        metrics["reward/" + stages_[j].domain] = state_.rows[row][j].mean();
      }
      monitor_->evaluation(metrics);
    }
  }

  // Trajectories of this rank's lanes go to rank 0, which puts them into the order of episodes.
  void log(const Rollout& rollout, const RolloutPlan& plan, const Unit& unit) {
    const bool learns = unit.kind == Unit::Kind::Learn;
    const auto is_logged = [&](size_t number) {
      return learns || options_.log_all || static_cast<int64_t>(number) % plan.group_size == 0;
    };
    std::string mine;
    for (size_t lane = 0; lane < rollout.numbers.size(); ++lane) {
      for (size_t i = 0; i < rollout.numbers[lane].size(); ++i) {
        const size_t number = rollout.numbers[lane][i];
        if (!is_logged(number)) continue;
        mine += fmt::format("{:08} ", number) +
                trajectory_line(rollout.episodes[lane][i],
                                {unit, static_cast<int64_t>(number), plan.group_size, plan.lanes}) +
                "\n";
      }
    }
    std::vector<std::string> lines;
    for (const auto& text : group_.gather_bytes(mine, 0, {.label = "trajectories"})) {
      for (size_t at = 0; at < text.size();) {
        const size_t end = text.find('\n', at);
        lines.push_back(text.substr(at, end - at + 1));
        at = end + 1;
      }
    }
    for (size_t number = 0; number < plan.episodes.size(); ++number) {
      if (is_logged(number)) ++state_.log_lines;
    }
    if (!world_.is_main()) return;
    std::sort(lines.begin(), lines.end());
    std::string all;
    for (const auto& line : lines) all += line.substr(9);
    append(path("trajectories.jsonl"), all);
  }

  void report(const Rollout& rollout, const Unit& unit, const Learnt& learnt) {
    int64_t mine = 0;
    for (const auto& lane : rollout.numbers) mine += static_cast<int64_t>(lane.size());
    monitor_->step({.samples = mine,
                    .learning_rate = options_.learning_rate,
                    .gradient_norm = learnt.gradient_norm,
                    .epoch = unit.stage,
                    .values = figures_of(rollout, learnt, unit.stage)});
  }

  void say_iteration(const Unit& unit, const Learnt& learnt) const {
    if (unit.number != 0 && (unit.number + 1) % 10 != 0) return;
    say("{} iteration {}: reward {:.3f}, equal groups {:.2f}, kl {:.4f}, entropy {:.3f}, gradient "
        "{:.2f}",
        stages_[static_cast<size_t>(unit.stage)].id, unit.number + 1, learnt.reward,
        learnt.equal_share, learnt.kl, learnt.entropy, learnt.gradient_norm);
  }

  void end_stage(int64_t stage) {
    learner_->set_reference();
    if (!uses_fsdp()) parallel::check_same(*net_, group_);
    const Clock clock(seconds_, "checkpoint");
    const std::string folder = path("grpo_checkpoints/" + stages_[static_cast<size_t>(stage)].id);
    checkpoint::Checkpointer own(group_, folder, {.retention = {.keep_last = 1}});
    learner_->track_net(own);
    own.save(state_.position);
    own.finish();
    if (options_.export_hf) export_model(folder + "/huggingface");
    write_results();
  }

  // Every rank calls it; rank 0 writes.
  void export_model(const std::string& folder) {
    learner_->unshard();
    std::string problem;
    try {
      if (world_.is_main()) {
        models::save_transformer(net_, folder);
        tokenizer_->save(folder + "/tokenizer.json");
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
    agree_on(group_, problem);
    learner_->reshard();
  }

  void save(checkpoint::Checkpointer& checkpoints, std::string& text) {
    const Clock clock(seconds_, "checkpoint");
    text = state_.to_json();
    checkpoints.save(state_.position);
  }

  void say_header(bool resumed) const {
    say("three_domain: {}, {} lanes, {} parameters, vocabulary {}, {}, {}", world_.describe(),
        options_.lanes, models::parameter_count(net_->options), tokenizer_->size(),
        options_.parallel, options_.precision);
    if (resumed) {
      say("goes on after {} of {} iterations", state_.iterations, total_iterations());
    }
    if (!group_.deterministic()) {
      say("sums over this transport have no fixed order: not bit-equal across numbers of ranks");
    }
  }

  void write_results() {
    result_.rows = state_.rows;
    result_.fingerprint = learner_->fingerprint();
    if (!world_.is_main()) return;
    std::map<std::string, std::string> environment;
    for (const auto& [name, value] : parallel::determinism_report(group_).items) {
      environment[name] = value;
    }
    environment["world"] = world_.describe();
    write_whole(options_.output_dir, "results.json",
                results_json(result_, stages_, options_, state_, seconds_, environment));
    if (stages_done(stages_, state_) == 0) return;
    metrics_ = metrics_json(record_of(stages_, options_, state_, result_, gold_));
    write_whole(options_.output_dir, "metrics.json", metrics_);
  }

  void finish() {
    write_results();
    monitor_->finish(result_.preempted ? "preempted" : "finished");
    monitor_.reset();  // its log is whole
    if (world_.is_main()) {
      write_whole(options_.output_dir, "report.html",
                  train::report_page({train::read_run(options_.output_dir)}));
    }
    if (result_.preempted) {
      say("saved after {} iterations; --resume goes on", state_.iterations);
      return;
    }
    if (!metrics_.empty()) say("{}", summary_text(metrics_));
    say("parameters {:016x}", result_.fingerprint);
  }

  const comm::World& world_;
  const comm::Group& group_;
  const Course& course_;
  RunOptions options_;
  std::string model_folder_;  // empty: a tiny one is made
  std::vector<StagePlan> stages_;
  std::vector<Unit> units_;
  RunState state_;
  RunResult result_;
  GoldCalls gold_;       // on rank 0
  std::string metrics_;  // metrics.json, on rank 0
  Seconds seconds_;
  models::Transformer net_{nullptr};
  std::optional<text::Tokenizer> tokenizer_;
  Learner* learner_ = nullptr;
  std::optional<train::RunMonitor> monitor_;
};

}  // namespace

RunResult run_continual(const comm::World& world, const Course& course, const RunOptions& options) {
  return Run(world, course, options).run();
}

}  // namespace lockstep::rl

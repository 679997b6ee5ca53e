#include "lockstep/train/monitor.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

#include "comm/together.h"
#include "core/files/lasting_path.h"
#include "core/process/own_process.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "train/monitor/gpu_use.h"
#include "train/monitor/outputs.h"
#include "train/monitor/run_environment.h"
#include "train/monitor/step_clock.h"
#include "train/monitor/step_trace.h"
#include "train/options.h"

namespace lockstep::train {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr double kNever = -1;

// A sum of losses, and how much it is the sum of.
struct LossSum {
  double sum = 0, weight = 0;

  void add(double loss, double share) {
    sum += loss * share;
    weight += share;
  }
  void add(const LossSum& other) {
    sum += other.sum;
    weight += other.weight;
  }
};

// What a rank tells in a report, as numbers of one tensor.
struct Told {
  double has_loss = 0, loss = 0, samples = 0, all_samples = 0;
  double step = 0, communication = 0, data = 0, checkpoint = 0, memory = 0;
  double gpu_busy = -1;
  double not_finite_at = kNever;  // the first step since the last report
  LossSum by_samples = {};        // of these steps, where it has samples
  LossSum by_steps = {};          // of these, where it has none
};
constexpr int64_t kTold = sizeof(Told) / sizeof(double);
static_assert(sizeof(Told) == kTold * sizeof(double));

std::vector<Told> gathered(const comm::Group& group, const Told& mine) {
  std::vector<Told> all(static_cast<size_t>(group.size()));
  Told own = mine;
  const auto input = at::from_blob(&own, {kTold}, at::kDouble);
  const auto output = at::from_blob(all.data(), {group.size() * kTold}, at::kDouble);
  group.all_gather(output, input, {.label = "metrics"}).wait();
  return all;
}

// The first parameter that has a number that is none in its gradient or itself.
std::string first_not_finite(const std::optional<ModuleRef>& module) {
  if (!module || module->has_expired()) return "";
  const auto is_finite = [](const at::Tensor& tensor) {
    return !tensor.defined() || tensor.is_sparse() || !tensor.is_floating_point() ||
           at::isfinite(tensor).all().item<bool>();
  };
  const at::NoGradGuard guard;
  for (const auto& [name, parameter] : module->parameters()) {
    if (!is_finite(parameter.grad()) || !is_finite(parameter)) return name;
  }
  return "";
}

void check(const MonitorOptions& options) {
  if (options.every_steps < 1) {
    throw ConfigError(
        fmt::format("[monitor] every_steps is {}: it has to be 1 or more", options.every_steps));
  }
  if (options.tensorboard && options.directory.empty()) {
    throw ConfigError("[monitor] tensorboard needs a directory for its files");
  }
  if (options.trace_steps.last == 0) return;
  if (options.directory.empty()) {
    throw ConfigError("[monitor] trace_steps needs a directory for trace.json");
  }
  StepTrace::check(options.trace_steps);
}

}  // namespace

struct RunMonitor::State {
  comm::World world;
  MonitorOptions options;
  StepClock clock = {};
  int64_t step = 0, reported = 0;          // steps made, and those of them that are in reports
  int64_t samples_here = 0;                // since the last report
  int64_t samples = 0;                     // on all ranks, in reports
  LossSum by_samples = {}, by_steps = {};  // here, since the last report
  StepFigures newest = {};                 // of the last step
  double not_finite_at = kNever;
  double reported_after = 0;  // seconds
  StepReport last = {};
  RunWarnings warnings{options.warnings};
  std::unique_ptr<MonitorOutputs> outputs = {};  // rank 0's
  std::unique_ptr<StepTrace> trace = {};         // null without
  std::function<double()> gpu = {};              // gpu_use(), on a GPU
  bool ended = false;
  const OwnProcess process = {};
  int exceptions = std::uncaught_exceptions();

  bool is_due(int64_t after) const {
    return after % options.every_steps == 0 || after == options.total_steps;
  }
  Told told(double gpu_busy);
  void report(const std::vector<Told>& all);
  void report_alone();
  void end(RunEnd how);
};

RunMonitor::RunMonitor(const comm::World& world, MonitorOptions options)
    : state_(new State{.world = world, .options = std::move(options)}) {
  for (auto* path : {&state_->options.directory, &state_->options.open_metrics_file}) {
    *path = lasting_path(*path);
  }
  const auto& group = world.group();
  group.refuse_python_ranks("RunMonitor");
  const MonitorOptions& given = state_->options;
  comm::together(group, "monitor", [&] { check(given); });
  compare_lines(
      {fmt::format("every_steps = {}", given.every_steps),
       fmt::format("total_steps = {}", given.total_steps),
       fmt::format("resumed_at = {}", given.resumed_at),
       fmt::format("trace_steps = {} to {}", given.trace_steps.first, given.trace_steps.last)},
      group);
  state_->step = state_->reported = std::max<int64_t>(given.resumed_at, 0);
  const auto hosts = group.all_gather_bytes(host_name(), {.label = "metrics: hosts"});
  const auto begin = [&] {
    if (world.is_main()) {
      const auto restart = env_int("TORCHELASTIC_RESTART_COUNT", 0, 1 << 20).value_or(0);
      state_->outputs =
          std::make_unique<MonitorOutputs>(given, RunStart{.ranks = world.size(),
                                                           .name = given.name,
                                                           .resumed_at = given.resumed_at,
                                                           .total_steps = given.total_steps,
                                                           .restart = static_cast<int>(restart),
                                                           .config = given.config,
                                                           .environment = run_environment(world),
                                                           .hosts = hosts});
    }
    if (given.trace_steps.last == 0) return;
    state_->trace = std::make_unique<StepTrace>(world, given.trace_steps,
                                                given.directory + "/trace.json", state_->step);
  };
  comm::together(group, "monitor", [&] {
    try {
      begin();
    } catch (const std::system_error& refused) {  // such as a thread
      throw Error(fmt::format("[monitor] {}", refused.what()));
    }
  });
  if (world.device().is_cuda()) state_->gpu = gpu_use(world.device().index());
  state_->clock.restart();
}

RunMonitor::~RunMonitor() {
  if (state_->ended) return;
  const bool is_thrown = std::uncaught_exceptions() > state_->exceptions;
  try {
    state_->end({.outcome = is_thrown ? "left by an exception" : "finished", .failed = is_thrown});
  } catch (const std::exception&) {
    // What is missing is the last line of a log.
  }
}

Told RunMonitor::State::told(double gpu_busy) {
  const RankFigures mine = clock.figures(step - reported);
  const bool counts = world.is_main() || !newest.is_of_all_ranks;
  return {.has_loss = counts && newest.loss ? 1.0 : 0.0,
          .loss = newest.loss.value_or(0),
          .samples = counts ? static_cast<double>(newest.samples) : 0,
          .all_samples = static_cast<double>(samples_here),
          .step = mine.step_seconds,
          .communication = mine.communication_seconds,
          .data = mine.data_seconds,
          .checkpoint = mine.checkpoint_seconds,
          .memory = static_cast<double>(mine.memory_bytes),
          .gpu_busy = gpu_busy,
          .not_finite_at = not_finite_at,
          .by_samples = by_samples,
          .by_steps = by_steps};
}

// `all`: what the ranks tell, or rank 0 alone.
void RunMonitor::State::report(const std::vector<Told>& all) {
  const bool is_alone = std::ssize(all) < world.size();
  const StepFigures& figures = newest;
  StepReport now{.step = step, .steps = step - reported, .epoch = figures.epoch};
  now.seconds = clock.at_mark();
  now.learning_rate = figures.learning_rate;
  now.gradient_norm = figures.gradient_norm;
  now.values = figures.values;
  now.keys = figures.keys;
  double loss = 0, weight = 0, taken = 0, bad_step = kNever;
  LossSum all_by_samples, all_by_steps;
  int bad_rank = -1;
  // Without samples ranks count equally. One may have none where others do, as under a Join.
  const bool has_samples =
      std::ranges::any_of(all, [](const Told& told) { return told.samples > 0; });
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Told& told = all[rank];
    const double share = told.has_loss * (has_samples ? told.samples : 1.0);
    if (share > 0) loss += told.loss * share;
    weight += share;
    taken += told.all_samples;
    all_by_samples.add(told.by_samples);
    all_by_steps.add(told.by_steps);
    if (told.not_finite_at != kNever && (bad_step == kNever || told.not_finite_at < bad_step)) {
      bad_step = told.not_finite_at;
      bad_rank = static_cast<int>(rank);
    }
    if (is_alone) continue;
    now.ranks.push_back({told.step, told.communication, told.data, told.checkpoint,
                         static_cast<int64_t>(told.memory), told.gpu_busy});
  }
  if (weight > 0) now.loss = loss / weight;
  const LossSum& of_steps = all_by_samples.weight > 0 ? all_by_samples : all_by_steps;
  if (of_steps.weight > 0) now.mean_loss = of_steps.sum / of_steps.weight;
  samples += static_cast<int64_t>(taken);
  now.samples = samples;
  now.samples_per_second =
      now.seconds > reported_after ? taken / (now.seconds - reported_after) : 0;

  reported = step;
  reported_after = now.seconds;
  samples_here = 0;
  not_finite_at = kNever;
  by_samples = by_steps = {};
  if (outputs) {
    const bool is_bad = bad_rank >= 0 || (now.loss && !std::isfinite(*now.loss)) ||
                        (now.gradient_norm && !std::isfinite(*now.gradient_norm));
    // Rank 0 is alone where a run fails, and a GPU that hangs would not answer.
    const std::string parameter = is_bad && !ended ? first_not_finite(options.module) : "";
    StepReport looked_at = now;
    // The loss may be finite again by now; the warning is about the first step that was not.
    if (bad_rank >= 0) {
      looked_at.loss = kNone;
      looked_at.step = static_cast<int64_t>(bad_step);
    }
    auto events = warnings.look(looked_at, parameter);
    for (Event& event : events) {
      if (bad_rank >= 0 && event.rank < 0 && event.step == looked_at.step) event.rank = bad_rank;
    }
    outputs->report(now, events);
  }
  last = std::move(now);
}

// Communicates nothing: other ranks may be gone.
void RunMonitor::State::report_alone() {
  if (step == reported || (world.size() > 1 && !newest.is_of_all_ranks)) return;
  const int64_t before = reported;
  report({told(-1)});
  reported = before;  // a report_rest() that comes too late still meets the other ranks
}

void RunMonitor::State::end(RunEnd how) {
  if (!process.is_here() || std::exchange(ended, true)) return;
  if (trace) trace->end(step);
  if (!outputs) return;
  report_alone();
  how.step = step;
  how.seconds = clock.since_start();
  outputs->end(how);
}

void RunMonitor::step(const StepFigures& figures) {
  State& state = *state_;
  ++state.step;
  state.clock.mark();
  state.newest = figures;
  if (state.world.is_main() || !figures.is_of_all_ranks) {
    state.samples_here += figures.samples;
    const bool counts = figures.loss && (!figures.is_skipped || std::isfinite(*figures.loss));
    if (counts && figures.samples > 0) {
      state.by_samples.add(*figures.loss, static_cast<double>(figures.samples));
    } else if (counts) {
      state.by_steps.add(*figures.loss, 1);
    }
  }
  if (figures.loss && !std::isfinite(*figures.loss) && state.not_finite_at == kNever) {
    state.not_finite_at = static_cast<double>(state.step);
  }
  if (state.is_due(state.step)) {
    const double gpu_busy = state.gpu ? state.gpu() : -1;
    state.report(gathered(state.world.group(), state.told(gpu_busy)));
  }
  if (state.trace) state.trace->after_step(state.step);
}

// How busy GPUs were in the last steps is no longer known: they may have evaluated since.
void RunMonitor::report_rest() {
  State& state = *state_;
  if (state.step == state.reported) return;
  const auto all = gathered(state.world.group(), state.told(-1));
  if (!state.ended) state.report(all);
}

bool RunMonitor::is_next_reported() const { return state_->is_due(state_->step + 1); }

int64_t RunMonitor::steps() const { return state_->step; }

void RunMonitor::evaluation(const std::map<std::string, double>& metrics) {
  if (!state_->outputs || state_->ended) return;
  state_->outputs->evaluation(
      {.step = state_->step, .seconds = state_->clock.since_start(), .metrics = metrics});
}

void RunMonitor::event(std::string_view kind, std::string_view text) {
  if (!state_->outputs || state_->ended) return;
  state_->outputs->event({.kind = std::string(kind),
                          .step = state_->step,
                          .seconds = state_->clock.since_start(),
                          .text = std::string(text)});
}

void RunMonitor::finish(std::string_view outcome) {
  state_->end({.outcome = std::string(outcome)});
}

void RunMonitor::fail(std::string_view what) {
  state_->end({.outcome = std::string(what), .failed = true});
}

std::string RunMonitor::metrics_url() const {
  return state_->outputs ? state_->outputs->metrics_url() : "";
}

const StepReport& RunMonitor::last() const { return state_->last; }

}  // namespace lockstep::train

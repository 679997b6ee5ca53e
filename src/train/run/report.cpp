#include "train/run/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <cmath>
#include <cstring>
#include <fstream>

#include "core/files/whole_file.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/parallel/lr_schedule.h"
#include "train/report/text.h"
#include "train/run/busy_seconds.h"

namespace lockstep::train {
namespace {

std::string precision_text(Precision precision) {
  if (precision == Precision::BFloat16) return "bfloat16 products, float32 weights and sums";
  if (precision == Precision::Float16) return "float16 products with loss scaling, float32 weights";
  return "no mixed precision";
}

// "batch 64 per rank x 2 ranks x 1 accumulated = 128 samples a step"
std::string batch_text(const TrainerOptions& options, int64_t samples, const comm::World& world) {
  const int64_t lanes = options.loader.lanes;
  const int64_t parts = lanes > 0 ? lanes : world.size();
  const char* const what = lanes > 0 ? "lane" : "rank";
  const auto all = static_cast<double>(options.loader.batch_size) * static_cast<double>(parts) *
                   static_cast<double>(options.accumulation);
  return fmt::format("batch {} per {} x {} {}{} x {} accumulated = {} sample{} a step{}",
                     with_commas(options.loader.batch_size), what, parts, what,
                     parts == 1 ? "" : "s", options.accumulation,
                     all < 1e15 ? with_commas(std::llround(all)) : fmt::format("{:.3g}", all),
                     all == 1 ? "" : "s",
                     all > static_cast<double>(samples)
                         ? fmt::format(", of which the data have {}", with_commas(samples))
                         : "");
}

std::string rate_text(const RunConfig& config, const TrainerOptions& options,
                      const comm::World& world) {
  const auto& given = config.optimizer;
  const auto count = static_cast<double>(std::max<int64_t>(options.loader.lanes, world.size()));
  std::string text = fmt::format("{}, learning rate {:g}", given.kind, given.learning_rate);
  if (given.lr_scaling == "linear") {
    text += fmt::format(" x {:g} (linear scaling) = {:g}", count, given.learning_rate * count);
  } else if (given.lr_scaling == "sqrt") {
    text += fmt::format(" x sqrt({:g}) (sqrt scaling) = {:g}", count,
                        given.learning_rate * std::sqrt(count));
  }
  text += ", " + config.schedule.kind;
  if (moves_momentum(config)) {
    const parallel::OneCycleOptions cycle;
    text += fmt::format(" with {} from {:g} to {:g} and back",
                        given.kind.starts_with("adam") ? "beta1" : "momentum", cycle.max_momentum,
                        cycle.base_momentum);
  }
  if (config.schedule.warmup_steps > 0) {
    text += fmt::format(" after {} of warm-up", counted(config.schedule.warmup_steps, "step"));
  } else if (config.schedule.warmup_ratio > 0) {
    text += fmt::format(" after {:g} % of warm-up", 100 * config.schedule.warmup_ratio);
  }
  return text;
}

// Numbers that an optimizer of the library keeps for each parameter; -1: not known.
double states_of(const RunConfig& config) {
  const auto& given = config.optimizer;
  if (given.kind == "adam" || given.kind == "adamw") return 2;
  if (given.kind == "sgd") return given.momentum > 0 || moves_momentum(config) ? 1 : 0;
  return -1;
}

// Over how many ranks each is sharded, and into how many units.
struct Divided {
  double parameters = 1, gradients = 1, optimizer = 1;
  size_t units = 0;  // 0: there is no Fsdp
  bool shares = false;
};

Divided divided_by(const Trainer& trainer, const TrainerOptions& options,
                   const comm::World& world) {
  if (!options.fsdp) return {.optimizer = options.zero ? static_cast<double>(world.size()) : 1};
  const auto& fsdp = *options.fsdp;
  Divided divided{.units = trainer.fsdp()->units().size(),
                  .shares = trainer.fsdp()->shares_memory()};
  if (fsdp.sharding == parallel::Sharding::None) return divided;
  divided.optimizer = fsdp.shard_ranks > 0 ? fsdp.shard_ranks : world.size();
  divided.gradients = divided.optimizer;
  if (fsdp.sharding == parallel::Sharding::Full) divided.parameters = divided.optimizer;
  return divided;
}

}  // namespace

std::vector<std::string> header(const RunConfig& config, const RunData& data,
                                const TrainerOptions& options, const Trainer& trainer,
                                const torch::nn::Module& model, const comm::World& world) {
  int64_t parameters = 0;
  double bytes = 0;
  for (const auto& parameter : model.parameters()) {
    parameters += parameter.numel();
    bytes += static_cast<double>(parameter.nbytes());
  }
  std::vector<std::string> lines;
  lines.push_back(fmt::format(
      "{}: {}; {}: {}{}", config.model.kind, counted(parameters, "parameter"), config.data.kind,
      counted(data.training->size(), "sample"),
      options.evaluation.data
          ? fmt::format(", evaluated on {}", with_commas(options.evaluation.data.dataset()->size()))
          : ", not evaluated"));
  lines.push_back(fmt::format("{}, {}, {}", world.describe(), world.device().str(),
                              precision_text(options.precision)));
  lines.push_back(batch_text(options, data.training->size(), world));
  const auto& state = trainer.state();
  const int64_t warmup = config.schedule.warmup_steps;
  if (world.is_main() && state.steps > 0 && warmup >= state.steps) {
    log::warn(fmt::format(
        "[run] schedule.warmup_steps is {}, and the run has {}: it never has its full learning "
        "rate. Give fewer, or schedule.warmup_ratio",
        warmup, counted(state.steps, "step")));
  }
  lines.push_back(fmt::format(
      "{}{}; {}", state.steps > 0 ? counted(state.steps, "step") : "no fixed number of steps",
      options.epochs > 0
          ? fmt::format(" in {} epoch{}", options.epochs, options.epochs == 1 ? "" : "s")
          : "",
      rate_text(config, options, world)));
  if (const auto& average = config.weight_average; average.kind != "none") {
    lines.push_back(
        fmt::format("evaluated with averaged weights: {}",
                    average.kind == "ema" ? fmt::format("EMA, decay {:g}", average.decay) : "SWA"));
  }
  const double states = states_of(config);
  const Divided divided = divided_by(trainer, options, world);
  if (divided.units > 0) {
    lines.push_back(fmt::format(
        "fsdp: {} in {} unit{} over {} rank{}, {}", config.parallel.fsdp.sharding_strategy,
        divided.units, divided.units == 1 ? "" : "s", divided.optimizer,
        divided.optimizer == 1 ? "" : "s",
        divided.shares ? "with one copy of the parameters on this host" : "gathered unit by unit"));
  }
  if (states >= 0) {
    const double parameter_bytes = bytes / divided.parameters,
                 gradient_bytes = bytes / divided.gradients;
    const double state_bytes = bytes * states / divided.optimizer;
    lines.push_back(fmt::format(
        "memory of each rank, without activations: {} = parameters {}, gradients {}, optimizer {}",
        memory_text(parameter_bytes + gradient_bytes + state_bytes), memory_text(parameter_bytes),
        memory_text(gradient_bytes), memory_text(state_bytes)));
  }
  const auto& saving = options.saving;
  if (!saving.directory.empty()) lines.push_back("checkpoints in " + saving.directory);
  for (const auto& remark : config.remarks) lines.push_back("note: " + remark);
  return lines;
}

std::vector<std::string> summary(const Ending& ending, const RunConfig& config) {
  const auto& state = ending.outcome.state;
  std::vector<std::string> lines;
  std::string metrics;
  for (const auto& [name, value] : state.metrics) {
    metrics += fmt::format("{} {} {}", metrics.empty() ? "; last evaluation:" : ",", name,
                           metric_text(value));
  }
  lines.push_back(fmt::format("{} after step {}: loss of this step {}{}",
                              name_of(ending.outcome.ended), state.step, metric_text(state.loss),
                              metrics));
  const double busy = busy_seconds(state);
  const int64_t steps = state.step - std::max<int64_t>(state.resumed_at, 0);
  const int64_t samples = state.samples - state.resumed_samples;
  lines.push_back(fmt::format(
      "{} in {:.2f} s, {} samples/s; {:.2f} s for data, {:.2f} s waiting for other ranks, "
      "{:.2f} s for evaluations, {:.2f} s for checkpoints",
      counted(steps, "step"), busy,
      with_commas(busy > 0 ? std::llround(static_cast<double>(samples) / busy) : 0),
      state.data_seconds, state.communication_seconds, state.evaluation_seconds,
      state.saving_seconds));
  if (steps == 0 && state.resumed_at >= 0) {
    lines.push_back("the run was complete already: raise training.epochs or training.max_steps");
  }
  std::vector<std::string> peaks;
  for (const double bytes : ending.peak_bytes) peaks.push_back(memory_text(bytes));
  lines.push_back(fmt::format("peak memory by rank: {}", fmt::join(peaks, ", ")));
  if (state.skipped > 0) lines.push_back(counted(state.skipped, "step") + " made no update");
  if (!ending.outcome.best.empty()) lines.push_back("best checkpoint: " + ending.outcome.best);
  if (!config.logging.output_dir.empty()) lines.push_back("wrote " + config.logging.output_dir);
  return lines;
}

double peak_memory() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) * 1024;
  }
  return 0;
}

void write_whole(const std::string& path, const std::string& text) {
  const int error = write_whole_file(path, text);
  if (error == 0) return;
  throw Error(fmt::format("[run] {} cannot be written: {}", path, std::strerror(error)));
}

}  // namespace lockstep::train

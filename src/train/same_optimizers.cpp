// Whether optimizers are the same: those of the ranks, and those of the options and a checkpoint.
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>
#include <string>
#include <typeinfo>
#include <variant>

#include "checkpoint/optimizer_fields.h"
#include "lockstep/core/log.h"
#include "train/options.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

std::string value_text(const checkpoint::Value& value) {
  return std::visit([](const auto& one) { return fmt::format("{}", one); }, value);
}

void add_plateau(std::vector<std::string>& lines, const parallel::PlateauOptions& o) {
  lines.push_back(
      fmt::format("plateau: better {}, factor {}, patience {}, threshold {} ({}), cooldown {}, "
                  "lowest_lr {}, eps {}",
                  static_cast<int>(o.better), o.factor, o.patience, o.threshold,
                  static_cast<int>(o.threshold_mode), o.cooldown, o.lowest_lr, o.eps));
}

// A schedule may be of fewer steps than the run could have, and refuse others. Other processors
// compute cosines with other last digits.
std::string rate_text(const TrainedPart& part, double base, int64_t step) {
  try {
    return fmt::format("{:.6g}", part.rate_of_step.lr(base, step));
  } catch (const std::exception&) {
    return "none";
  }
}

// Rates of a run's beginning, middle and end.
void add_rates(std::vector<std::string>& lines, const TrainedPart& part, int64_t steps) {
  for (size_t i = 0; i < part.base_rates.size(); ++i) {
    const double base = part.base_rates[i];
    lines.push_back(fmt::format("learning rate {} in group {}", base, i));
    if (!part.schedule) continue;
    for (const int64_t step : {int64_t{0}, steps / 2, steps}) {
      lines.push_back(fmt::format("learning rate {} in group {} at step {}",
                                  rate_text(part, base, step), i, step));
    }
  }
}

std::vector<std::string> lines_of_part(const TrainedPart& part, int64_t steps) {
  const auto& optimizer = *part.optimizer;
  std::vector<std::string> lines{c10::demangle(typeid(optimizer).name())};
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = group.options();
    lines.push_back(fmt::format("a group of {} parameters with {}", group.params().size(),
                                c10::demangle(typeid(options).name())));
  }
  add_rates(lines, part, steps);
  if (part.plateau_options) add_plateau(lines, *part.plateau_options);
  for (const auto& [name, value] : checkpoint::option_values(optimizer)) {
    lines.push_back(fmt::format("{} = {}", name, value_text(value)));
  }
  for (auto& line : lines) line = fmt::format("optimizer of {}: {}", part.name, line);
  return lines;
}

}  // namespace

void Training::compare_optimizers() const {
  std::vector<std::string> all;
  for (const auto& part : parts_) {
    for (auto& line : lines_of_part(part, state_.steps)) all.push_back(std::move(line));
  }
  compare_lines(all, world_.group());
}

std::vector<checkpoint::Values> Training::optimizer_options() const {
  std::vector<checkpoint::Values> all;
  for (const auto& part : parts_) all.push_back(checkpoint::option_values(*part.optimizer));
  return all;
}

// All but what the schedule sets.
void Training::warn_of_restored_options(const std::vector<checkpoint::Values>& given) const {
  const auto now = optimizer_options();
  for (size_t i = 0; i < parts_.size(); ++i) {
    const bool sets_momentum = parts_[i].schedule && parts_[i].rate_of_step.momentum;
    for (const auto& [path, value] : given[i]) {
      const std::string name = path.substr(path.rfind('/') + 1);
      if (name == "lr" || (sets_momentum && (name == "momentum" || name == "betas"))) continue;
      if (now[i].at(path) == value) continue;
      log::warn(
          fmt::format("[train] optimizer of {}, {}: {} of the checkpoint is used, not {}. A "
                      "callback can set it after restoring, in on_train_begin()",
                      parts_[i].name, path, value_text(now[i].at(path)), value_text(value)));
    }
  }
}

}  // namespace lockstep::train

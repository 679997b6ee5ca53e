#include "train/config/replaced.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace lockstep::train {
namespace {

constexpr std::array<std::string_view, 11> kSizes = {
    "model.vocabulary", "model.layers",     "model.hidden",   "model.feed_forward",
    "model.heads",      "model.kv_heads",   "model.head_dim", "model.max_length",
    "model.tied",       "model.rope_theta", "model.norm_eps"};

}  // namespace

bool moves_momentum(const RunConfig& config) {
  return config.schedule.kind == "one_cycle" && config.schedule.cycle_momentum;
}

std::string replaced_by(const RunConfig& config, const std::string& path) {
  const auto& pretrained = config.model.transformer.pretrained;
  if (config.model.kind == "transformer" && !pretrained.empty() &&
      std::find(kSizes.begin(), kSizes.end(), path) != kSizes.end()) {
    return "model.pretrained gives the sizes";
  }
  const bool is_adam = config.optimizer.kind == "adam" || config.optimizer.kind == "adamw";
  const char* const momentum = is_adam ? "optimizer.beta1" : "optimizer.momentum";
  if (path == momentum && moves_momentum(config)) {
    return "schedule.kind one_cycle moves it; schedule.cycle_momentum: false keeps it";
  }
  if (path == "training.epochs" && config.training.max_steps > 0) {
    return fmt::format("training.max_steps {} ends the training", config.training.max_steps);
  }
  return "";
}

void note_replaced(RunConfig& config) {
  for (const auto& [path, origin] : config.origins) {
    const std::string why = replaced_by(config, path);
    if (!why.empty()) {
      config.remarks.push_back(fmt::format("{}: {} has no effect: {}", origin, path, why));
    }
  }
}

}  // namespace lockstep::train

// result.json.
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "train/run/busy_seconds.h"
#include "train/run/report.h"

namespace lockstep::train {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

}  // namespace

std::string result_json(const Ending& ending, const RunConfig& config, const comm::World& world) {
  const auto& state = ending.outcome.state;
  Json metrics = Json::object();
  for (const auto& [name, value] : state.metrics) metrics[name] = number(value);
  const double busy = busy_seconds(state);
  const auto samples = static_cast<double>(state.samples - state.resumed_samples);
  Json best_metric, best_value, best_step;
  if (!ending.outcome.best.empty()) {
    const auto manifest = checkpoint::Checkpoint(ending.outcome.best).manifest();
    best_metric = config.checkpoint.best_metric;
    const auto value = manifest.metrics.find(config.checkpoint.best_metric);
    if (value != manifest.metrics.end()) best_value = number(value->second);
    best_step = manifest.step;
  }
  const Json result = {
      {"status", name_of(ending.outcome.ended)},
      {"exit_status", ending.outcome.exit_status()},
      {"step", state.step},
      {"epoch", state.epoch},
      {"samples", state.samples},
      {"train_loss", number(state.loss)},
      {"metrics", metrics},
      {"evaluated_at", state.evaluated_at < 0 ? Json(nullptr) : Json(state.evaluated_at)},
      {"skipped", state.skipped},
      {"best_checkpoint", ending.outcome.best.empty() ? Json(nullptr) : Json(ending.outcome.best)},
      {"best_metric", best_metric},
      {"best_value", best_value},
      {"best_step", best_step},
      {"resumed_at", state.resumed_at < 0 ? Json(nullptr) : Json(state.resumed_at)},
      {"world_size", world.size()},
      {"samples_per_s", number(busy > 0 ? samples / busy : 0)},
      {"seconds",
       {{"total", state.seconds},
        {"steps", busy},
        {"data", state.data_seconds},
        {"communication", state.communication_seconds},
        {"evaluation", state.evaluation_seconds},
        {"checkpoints", state.saving_seconds}}},
      {"peak_bytes", ending.peak_bytes}};
  return result.dump(1) + "\n";
}

std::string result_json(const std::string& error, int exit_status, const RunState& state,
                        const comm::World& world) {
  const Json result = {
      {"status", "failed"},        {"exit_status", exit_status}, {"error", error},
      {"step", state.step},        {"epoch", state.epoch},       {"samples", state.samples},
      {"world_size", world.size()}};
  return result.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep::train

// Records as lines of JSON.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "lockstep/train/run_log.h"

namespace lockstep::train {
namespace {

// Keys in the order in which they are written, which is the one to read in.
using Json = nlohmann::ordered_json;

Json number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

// Times are known to microseconds, and six digits say a share.
Json rounded(double seconds) {
  if (!std::isfinite(seconds)) return number(seconds);
  return std::round(seconds * 1e6) / 1e6;
}

Json numbers(const std::map<std::string, double>& values) {
  Json all = Json::object();
  for (const auto& [name, value] : values) all[name] = number(value);
  return all;
}

Json header(const char* type, double unix_seconds) {
  return {{"type", type}, {"time", std::round(unix_seconds * 1e3) / 1e3}};
}

Json json_of(const RunStart& start, double now) {
  Json line = header("run", now);
  line["version"] = kRunLogVersion;
  line["ranks"] = start.ranks;
  if (!start.name.empty()) line["name"] = start.name;
  if (start.resumed_at >= 0) line["resumed_at"] = start.resumed_at;
  if (start.total_steps > 0) line["total_steps"] = start.total_steps;
  if (start.restart > 0) line["restart"] = start.restart;
  line["config"] = start.config;
  line["environment"] = start.environment;
  if (!start.hosts.empty()) line["hosts"] = start.hosts;
  return line;
}

template <class Value>
Json column(const std::vector<RankFigures>& ranks, const Value& value) {
  Json all = Json::array();
  for (const auto& rank : ranks) all.push_back(value(rank));
  return all;
}

Json figures_of(const StepReport& report, double now) {
  Json line = header("step", now);
  line["step"] = report.step;
  if (report.steps != 1) line["steps"] = report.steps;
  line["epoch"] = report.epoch;
  line["seconds"] = rounded(report.seconds);
  if (report.loss) line["loss"] = number(*report.loss);
  if (report.mean_loss) line["mean_loss"] = number(*report.mean_loss);
  if (report.learning_rate) line["learning_rate"] = number(*report.learning_rate);
  if (report.gradient_norm) line["gradient_norm"] = number(*report.gradient_norm);
  line["samples"] = report.samples;
  line["samples_per_second"] = rounded(report.samples_per_second);
  if (!report.values.empty()) line["values"] = numbers(report.values);
  if (report.ranks.empty()) return line;
  Json& ranks = line["ranks"];
  ranks["step_seconds"] =
      column(report.ranks, [](const auto& r) { return rounded(r.step_seconds); });
  ranks["communication_seconds"] =
      column(report.ranks, [](const auto& r) { return rounded(r.communication_seconds); });
  ranks["data_seconds"] =
      column(report.ranks, [](const auto& r) { return rounded(r.data_seconds); });
  ranks["checkpoint_seconds"] =
      column(report.ranks, [](const auto& r) { return rounded(r.checkpoint_seconds); });
  ranks["memory_bytes"] = column(report.ranks, [](const auto& r) { return r.memory_bytes; });
  const bool has_gpus = std::any_of(report.ranks.begin(), report.ranks.end(),
                                    [](const auto& r) { return r.gpu_busy >= 0; });
  if (!has_gpus) return line;
  ranks["gpu_busy"] = column(report.ranks, [](const auto& r) {
    return r.gpu_busy < 0 ? Json(nullptr) : rounded(r.gpu_busy);
  });
  return line;
}

Json json_of(const StepReport& report, double now) {
  Json line = figures_of(report, now);
  if (report.keys.empty()) return line;
  const Json own = Json::parse(report.keys, nullptr, /*allow_exceptions=*/false);
  if (!own.is_object()) return line;
  for (const auto& [key, value] : own.items()) {
    if (!line.contains(key)) line[key] = value;
  }
  return line;
}

Json json_of(const EvaluationReport& report, double now) {
  Json line = header("evaluation", now);
  line["step"] = report.step;
  line["seconds"] = rounded(report.seconds);
  line["metrics"] = numbers(report.metrics);
  return line;
}

Json json_of(const Event& event, double now) {
  Json line = header("event", now);
  line["kind"] = event.kind;
  line["step"] = event.step;
  line["seconds"] = rounded(event.seconds);
  if (event.rank >= 0) line["rank"] = event.rank;
  if (!event.text.empty()) line["text"] = event.text;
  if (!event.advice.empty()) line["advice"] = event.advice;
  return line;
}

Json json_of(const RunEnd& end, double now) {
  Json line = header("end", now);
  line["step"] = end.step;
  line["seconds"] = rounded(end.seconds);
  line["outcome"] = end.outcome;
  if (end.failed) line["failed"] = true;
  return line;
}

}  // namespace

double RankFigures::compute_seconds() const {
  return std::max(0.0, step_seconds - communication_seconds - data_seconds - checkpoint_seconds);
}

double RankFigures::working_seconds() const {
  return std::max(0.0, step_seconds - communication_seconds);
}

std::string log_line(const LogRecord& record, double unix_seconds) {
  const Json line = std::visit([&](const auto& one) { return json_of(one, unix_seconds); }, record);
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace lockstep::train

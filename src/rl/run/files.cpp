#include "rl/run/files.h"

#include <fmt/format.h>

#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "core/counted.h"
#include "lockstep/rl/scores.h"
#include "train/run/report.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

// The guides' threshold for a stage that is passed.
constexpr double kPassed = 0.5;

Json json_of(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

// Of each value of the configuration.
std::map<std::string, std::string> origins_of(const RunOptions& options) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : options.as_text()) {
    const auto found = options.origins.find(name);
    out[name] = found == options.origins.end() ? "preset" : found->second;
  }
  return out;
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// How a stage learnt.
Json stage_json(const StagePlan& stage, size_t s, const RunOptions& options,
                const RunState& state) {
  Json curve = Json::array();
  double sum = 0;
  for (const auto& point : state.curve) {
    if (point.stage != static_cast<int64_t>(s)) continue;
    curve.push_back(point.learnt.reward);
    sum += point.learnt.reward;
  }
  Json ends = Json::object();
  for (size_t e = 1; e < state.ends[s].size(); ++e) {
    if (state.ends[s][e] > 0) ends[std::string(name_of(static_cast<End>(e)))] = state.ends[s][e];
  }
  const auto points = static_cast<int64_t>(curve.size());
  return {{"stage_id", stage.id},
          {"domain", stage.domain},
          {"iterations", stage.iterations},
          {"learning",
           {{"episodes", points * options.prompts * options.group_size},
            {"mean_reward", points > 0 ? sum / static_cast<double>(points) : 0},
            {"curve", std::move(curve)}}},
          {"end_reasons", std::move(ends)},
          {"seconds", state.seconds[s]}};
}

// What it has learnt.
void add_scores(Json& stage, double reward, const StageScores& scores) {
  stage["eval_reward"] = reward;
  stage["retention_reward"] = json_of(scores.retention);
  stage["pass_k_rates"] = Json::object();
  for (const auto& [k, rate] : scores.pass_hat_k) stage["pass_k_rates"][std::to_string(k)] = rate;
  stage["new_tool_success_rate"] = json_of(scores.new_tool_success);
  stage["tool_performance"] = Json::object();
  for (const auto& [tool, figures] : scores.tools) {
    stage["tool_performance"][tool] = {{"selection", figures.selection},
                                       {"invocation", json_of(figures.invocation)},
                                       {"output_usage", json_of(figures.output_usage)},
                                       {"success", figures.success}};
  }
  stage["passed"] = reward >= kPassed;
}

}  // namespace

double Cell::mean() const {
  double sum = 0;
  for (const auto& trial : trials) sum += trial.reward;
  return trials.empty() ? 0 : sum / static_cast<double>(trials.size());
}

std::vector<std::vector<double>> RunResult::matrix() const {
  std::vector<std::vector<double>> out;
  for (const auto& row : rows) {
    out.emplace_back();
    for (const auto& cell : row) out.back().push_back(cell.mean());
  }
  return out;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec);
}

std::string results_json(const RunResult& result, const Curriculum& curriculum,
                         const RunOptions& options, const RunState& state,
                         const std::vector<StageScores>& scores, const std::string& metrics,
                         const Facts& facts) {
  const auto matrix = result.matrix();
  Json out{{"version", 1},
           {"program", "three_domain"},
           {"started", facts.started},
           {"ended", now_text()},
           {"config", options.as_text()},
           {"origins", origins_of(options)},
           {"environment", facts.environment},
           {"model",
            {{"parameters", facts.parameters},
             {"vocabulary", facts.vocabulary},
             {"tokenizer_sha256", facts.tokenizer_sha256}}},
           {"baselines", Json::object()},
           {"stages", Json::array()}};
  const auto& columns = curriculum.columns;
  for (size_t j = 0; j < columns.size(); ++j) {
    Json& of_domain = out["baselines"][columns[j].domain];
    if (j < result.null_agent.size()) of_domain["null"] = result.null_agent[j];
    if (!matrix.empty() && j < matrix[0].size()) of_domain["warm_up"] = matrix[0][j];
    if (j < result.oracle.size()) of_domain["oracle"] = result.oracle[j];
  }
  for (size_t s = 0; s < scores.size(); ++s) {
    const auto& rewards = matrix[s + 1];
    out["stages"].push_back(stage_json(curriculum.stages[s], s, options, state));
    add_scores(out["stages"].back(), curriculum.is_joint() ? mean_of(rewards) : rewards[s],
               scores[s]);
  }
  Json domains = Json::array();
  Json tasks = Json::array();
  for (const auto& column : columns) {
    domains.push_back(column.domain);
    tasks.push_back(column.evaluation.size());
  }
  Json rows = Json::array();
  for (size_t i = 0; i < matrix.size(); ++i) {
    rows.push_back(i == 0 ? "no stage" : curriculum.stages[i - 1].id);
  }
  out["matrix"] = {{"rows", std::move(rows)},
                   {"columns", std::move(domains)},
                   {"R", matrix},
                   {"n_tasks", std::move(tasks)},
                   {"n_trials", options.eval_trials}};
  if (!metrics.empty()) out["matrix"]["ci95"] = Json::parse(metrics).at("matrix").at("R_ci95");
  out["seconds"] = facts.seconds;
  out["parameters_checksum"] = fmt::format("{:016x}", result.fingerprint);
  return out.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string written(const std::string& path, const std::function<std::string()>& text) {
  try {
    train::write_whole(path, text());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::string write_result_files(const std::string& folder, const std::string& results,
                               const std::string& metrics) {
  std::string problem;
  const auto write = [&](const std::string& name, const std::function<std::string()>& text) {
    const std::string other = written(folder + "/" + name, text);
    if (problem.empty()) problem = other;
  };
  write("results.json", [&] { return results; });
  if (!metrics.empty()) write("metrics.json", [&] { return metrics; });
  for (const auto& [name, picture] : pictures(results, metrics)) {
    write(name, [&picture = picture] { return picture; });
  }
  write("analysis_report.md", [&] { return analysis_report(results, metrics); });
  return problem;
}

std::string linked(const std::string& folder, const std::string& name, const std::string& target) {
  namespace fs = std::filesystem;
  const fs::path link = fs::path(folder) / name;
  std::error_code error;
  if (fs::exists(fs::symlink_status(link, error))) return "";
  fs::create_directories(folder, error);
  fs::create_directory_symlink(target, link, error);
  return error
             ? fmt::format("{} cannot be linked to {}: {}", link.string(), target, error.message())
             : "";
}

std::string header_text(const comm::World& world, const RunOptions& options, const Facts& facts) {
  std::string out =
      fmt::format("three_domain: {}, {}, {}, {} parameters, vocabulary {}, {}, {}",
                  world.describe(), world.device().str(), counted(options.lanes, "lane"),
                  facts.parameters, facts.vocabulary, options.parallel, options.precision);
  for (const auto& [name, value] : options.as_text()) {
    const auto origin = options.origins.find(name);
    if (origin == options.origins.end()) continue;
    out += fmt::format("\n--{} {} ({})", name, value, origin->second);
  }
  return out;
}

std::string summary_text(const std::string& metrics) {
  const Json json = Json::parse(metrics);
  std::string out = fmt::format("{:<24}{:>10}{:>18}", "summary", "this run", "guides' own");
  const auto line = [&](const char* name, const Json& ours, const Json& theirs) {
    const auto text = [](const Json& value) {
      return value.is_number() ? fmt::format("{:.3f}", value.get<double>()) : std::string("-");
    };
    out += fmt::format("\n{:<24}{:>10}{:>18}", name, text(ours), text(theirs));
  };
  const Json& matrix = json.at("matrix");
  const Json none = nullptr;
  // A joint run has none of these.
  const auto guides = [&](const char* name) { return json.at("guides").value(name, none); };
  line("average accuracy", matrix.at("acc"), none);
  line("backward transfer", matrix.at("bwt"), guides("backward_transfer"));
  line("forward transfer", matrix.at("fwt"), guides("forward_transfer"));
  line("forgetting", matrix.at("forgetting"), guides("average_forgetting"));
  if (matrix.contains("intransigence")) line("intransigence", matrix.at("intransigence"), none);
  line("learning accuracy", matrix.at("learning_accuracy"), json.at("basic").at("average_reward"));
  for (const auto& [k, value] : json.at("basic").at("pass_hat_k").items()) {
    const Json theirs = guides("pass_at_k");
    line(fmt::format("pass^{}", k).c_str(), value, theirs.contains(k) ? theirs.at(k) : none);
  }
  line("area under the curve", json.at("learning_efficiency").at("aulc_training"), guides("aulc"));
  return out + "\n(the guides' definitions are others: docs/three_domain_metrics.md)";
}

std::string matrix_text(const RunResult& result, const Curriculum& curriculum) {
  std::string out = fmt::format("{:<24}", "mean reward after");
  for (const auto& column : curriculum.columns) out += fmt::format("{:>10}", column.domain);
  const auto line = [&](const std::string& name, const std::vector<double>& values) {
    out += fmt::format("\n{:<24}", name);
    for (const double value : values) out += fmt::format("{:>10.3f}", value);
  };
  if (!result.null_agent.empty()) line("an agent that does nothing", result.null_agent);
  const auto matrix = result.matrix();
  for (size_t i = 0; i < matrix.size(); ++i) {
    line(i == 0 ? "no stage" : curriculum.stages[i - 1].id, matrix[i]);
  }
  if (!result.oracle.empty()) line("an oracle", result.oracle);
  return out;
}

}  // namespace lockstep::rl

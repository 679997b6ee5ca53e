// analysis_report.md.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "rl/run/files.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

std::string number(const Json& value, const char* format = "{:.3f}") {
  if (!value.is_number()) return "–";
  return fmt::format(fmt::runtime(format), value.get<double>());
}

std::string change(const Json& value) { return number(value, "{:+.3f}"); }

std::string interval(const Json& value) {
  if (!value.is_array() || value.size() != 2) return "";
  return fmt::format(" ({} to {})", number(value[0], "{:.2f}"), number(value[1], "{:.2f}"));
}

// A row of a table.
std::string row(const std::vector<std::string>& cells) {
  std::string out = "|";
  // A name that a model has made up may have any characters.
  for (auto cell : cells) {
    for (char& c : cell) {
      if (c == '|' || c == '\n') c = ' ';
    }
    out += " " + cell + " |";
  }
  return out + "\n";
}

std::string head(const std::vector<std::string>& cells) {
  std::string out = row(cells) + "|";
  for (size_t i = 0; i < cells.size(); ++i) out += i == 0 ? " --- |" : " ---: |";
  return out + "\n";
}

std::string matrix_table(const Json& results) {
  const Json& matrix = results.at("matrix");
  const Json intervals = matrix.value("ci95", Json::array());
  std::vector<std::string> names{"mean reward after"};
  for (const auto& domain : matrix.at("columns")) names.push_back(domain.get<std::string>());
  std::string out = head(names);
  const auto baseline = [&](const char* key, const char* name) {
    std::vector<std::string> cells{name};
    for (const auto& [domain, scores] : results.at("baselines").items()) {
      if (scores.contains(key)) cells.push_back(number(scores.at(key)));
    }
    if (cells.size() == names.size()) out += row(cells);
  };
  baseline("null", "an agent that does nothing");
  for (size_t i = 0; i < matrix.at("R").size(); ++i) {
    std::vector<std::string> cells{matrix.at("rows")[i].get<std::string>()};
    const Json& rewards = matrix.at("R")[i];
    for (size_t j = 0; j < rewards.size(); ++j) {
      const bool has = i < intervals.size() && j < intervals[i].size();
      cells.push_back(number(rewards[j]) + (has ? interval(intervals[i][j]) : ""));
    }
    cells.resize(names.size());
    out += row(cells);
  }
  baseline("oracle", "an oracle");
  return out;
}

std::string figures_table(const Json& metrics) {
  const Json& matrix = metrics.at("matrix");
  std::string out = head({"figure", "value"});
  for (const auto& [key, name] :
       {std::pair("acc", "average accuracy: mean of the last row"),
        std::pair("learning_accuracy", "learning accuracy: each domain right after its stage"),
        std::pair("bwt", "backward transfer: what later stages did to earlier domains"),
        std::pair("fwt", "forward transfer: what earlier stages did to later domains"),
        std::pair("forgetting", "forgetting: the best reward of a domain minus its last"),
        std::pair("intransigence", "intransigence: a joint run's reward minus that of stages")}) {
    if (!matrix.contains(key)) continue;
    out += row({name, number(matrix.at(key)) +
                          interval(matrix.value(std::string(key) + "_ci95", Json()))});
  }
  for (const auto& [k, value] : metrics.at("basic").at("pass_hat_k").items()) {
    out += row({fmt::format("pass^{}: {} trials of a task all succeed", k, k), number(value)});
  }
  return out;
}

std::string parts_text(const Json& values, const char* format) {
  std::string out;
  for (const auto& [name, value] : values.items()) {
    out += fmt::format("{}{} {}", out.empty() ? "" : ", ", name, number(value, format));
  }
  return out.empty() ? "none" : out;
}

std::string stage_text(const Json& stage) {
  const Json& learning = stage.at("learning");
  const Json& curve = learning.at("curve");
  std::string out = fmt::format("## {}\n\n", stage.at("stage_id").get<std::string>());
  out += fmt::format("{} episodes in {} iterations, mean reward {}",
                     learning.at("episodes").get<int64_t>(), curve.size(),
                     number(learning.at("mean_reward")));
  if (!curve.empty()) {
    out +=
        fmt::format(" (first iteration {}, last {})", number(curve.front()), number(curve.back()));
  }
  out += fmt::format(".\n\n* On its own test tasks: {} ({}).\n", number(stage.at("eval_reward")),
                     stage.at("passed").get<bool>() ? "passed" : "not passed");
  if (stage.at("retention_reward").is_number()) {
    out += fmt::format("* On earlier domains: {}.\n", number(stage.at("retention_reward")));
  }
  if (stage.at("new_tool_success_rate").is_number()) {
    out += fmt::format("* On tasks with a tool that no earlier stage has: {}.\n",
                       number(stage.at("new_tool_success_rate")));
  }
  std::string rates;
  for (const auto& [k, rate] : stage.at("pass_k_rates").items()) {
    rates += fmt::format("{}pass^{} {}", rates.empty() ? "" : ", ", k, number(rate));
  }
  out += fmt::format("* {}.\n", rates);
  out += fmt::format("* Episodes ended: {}.\n", parts_text(stage.at("end_reasons"), "{:.0f}"));
  out += fmt::format("* Seconds: {}.\n", parts_text(stage.at("seconds"), "{:.1f}"));
  if (stage.at("tool_performance").empty()) return out;
  out += "\n" + head({"tool", "selection", "invocation", "output usage", "success"});
  for (const auto& [tool, figures] : stage.at("tool_performance").items()) {
    out += row({"`" + tool + "`", number(figures.at("selection")), number(figures.at("invocation")),
                number(figures.at("output_usage")), number(figures.at("success"))});
  }
  return out;
}

// Each domain's way: before its stage, after it, and at the end.
std::string domains_table(const Json& results) {
  const Json& matrix = results.at("matrix");
  const Json& r = matrix.at("R");
  const size_t stages = results.at("stages").size();
  if (stages != matrix.at("columns").size()) return "";
  std::string out =
      head({"domain", "before its stage", "after it", "gain", "at the end", "change since"});
  for (size_t j = 0; j < stages; ++j) {
    const auto reward = [&](size_t row) { return r[row][j].get<double>(); };
    const double before = reward(j), after = reward(j + 1), last = reward(stages);
    out += row({matrix.at("columns")[j].get<std::string>(), number(before), number(after),
                change(after - before), number(last), change(last - after)});
  }
  return "\n" + out;
}

}  // namespace

std::string analysis_report(const std::string& results_text, const std::string& metrics_text) {
  const Json results = Json::parse(results_text);
  const Json& config = results.at("config");
  const auto of = [&](const char* name) { return config.at(name).get<std::string>(); };
  std::string out = fmt::format(
      "# What the agent has learnt\n\nOrder {}, environment {}, model {}, {}, seed {}; {} "
      "parameters, {}. From {} to {}; the parameters' checksum is {}.\n\n",
      of("order"), of("env"), of("model").empty() ? "the tiny one" : of("model"),
      of("use-grpo") == "true" ? "GRPO" : "imitation of episodes of reward 1", of("seed"),
      results.at("model").at("parameters").get<int64_t>(),
      results.at("environment").at("world").get<std::string>(),
      results.at("started").get<std::string>(), results.at("ended").get<std::string>(),
      results.at("parameters_checksum").get<std::string>());
  out +=
      fmt::format("Mean reward on each domain's test tasks ({}), {} trials of each",
                  fmt::join(results.at("matrix").at("n_tasks").get<std::vector<int64_t>>(), ", "),
                  results.at("matrix").at("n_trials").get<int64_t>());
  out += results.at("matrix").contains("ci95") ? ", with 95 % intervals:\n\n" : ":\n\n";
  out += matrix_table(results);
  if (metrics_text.empty()) return out + "\nNo stage is over yet.\n";
  out += domains_table(results) + "\n" + figures_table(Json::parse(metrics_text));
  for (const auto& stage : results.at("stages")) out += "\n" + stage_text(stage);
  return out +
         "\nmetrics.json has all figures with their intervals; docs/three_domain.md and "
         "docs/three_domain_metrics.md say what each means.\n";
}

}  // namespace lockstep::rl

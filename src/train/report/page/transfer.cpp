#include "train/report/page/transfer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "train/report/text.h"

namespace lockstep::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostDomains = 64;

std::string interval_text(const Json& interval) {
  if (!interval.is_array() || interval.size() != 2) return "";
  if (!interval[0].is_number() || !interval[1].is_number()) return "";
  return fmt::format("{:.2f} to {:.2f}", interval[0].get<double>(), interval[1].get<double>());
}

// The colour says what the figure says.
std::string cell_html(const Transfer::Cell& cell, bool learnt) {
  return fmt::format(
      "<td class=\"n\" style=\"background:color-mix(in srgb,var(--good) {:.0f}%,transparent)\">"
      "{}{:.3f}{}{}</td>",
      30 * std::clamp(cell.reward, 0.0, 1.0), learnt ? "<strong>" : "", cell.reward,
      learnt ? "</strong>" : "",
      cell.interval.empty() ? ""
                            : "<br><span class=\"muted\">" + escaped(cell.interval) + "</span>");
}

}  // namespace

std::optional<Transfer> transfer_of(std::string_view metrics_json) {
  const Json json = Json::parse(metrics_json, nullptr, false);
  if (!json.is_object() || !json.contains("matrix") || !json["matrix"].is_object()) return {};
  const Json& matrix = json["matrix"];
  if (!matrix.contains("columns") || !matrix.contains("R") || !matrix["R"].is_array()) return {};
  Transfer out;
  for (const auto& name : matrix["columns"]) {
    if (!name.is_string()) return {};
    out.domains.push_back(name);
  }
  const size_t columns = out.domains.size();
  if (columns == 0 || columns > kMostDomains || matrix["R"].size() != columns + 1) return {};
  const Json intervals = matrix.value("R_ci95", Json::array());
  for (size_t i = 0; i <= columns; ++i) {
    const Json& row = matrix["R"][i];
    if (!row.is_array() || row.size() != columns) return {};
    auto& cells = out.rows.emplace_back();
    for (size_t j = 0; j < columns; ++j) {
      if (!row[j].is_number()) return {};
      const bool has_interval =
          i < intervals.size() && intervals[i].is_array() && j < intervals[i].size();
      cells.push_back({row[j], has_interval ? interval_text(intervals[i][j]) : ""});
    }
  }
  for (const auto& [key, title] :
       {std::pair("acc", "average accuracy"), std::pair("bwt", "backward transfer"),
        std::pair("fwt", "forward transfer"), std::pair("forgetting", "forgetting"),
        std::pair("learning_accuracy", "learning accuracy")}) {
    if (!matrix.contains(key) || !matrix[key].is_number()) continue;
    const std::string interval = interval_text(matrix.value(std::string(key) + "_ci95", Json()));
    out.figures.emplace_back(title, fmt::format("{:.3f}{}", matrix[key].get<double>(),
                                                interval.empty() ? "" : " (" + interval + ")"));
  }
  return out;
}

std::string transfer_section(const RunHistory& run) {
  if (!run.transfer) return "";
  const Transfer& transfer = *run.transfer;
  std::string head = "<th scope=\"col\">measured after</th>";
  for (const auto& domain : transfer.domains) {
    head += fmt::format("<th scope=\"col\" class=\"n\">{}</th>", escaped(domain));
  }
  std::string rows;
  for (size_t i = 0; i < transfer.rows.size(); ++i) {
    const std::string name = i == 0 ? "no stage" : "stage " + transfer.domains[i - 1];
    rows += fmt::format("<tr><th scope=\"row\">{}</th>", escaped(name));
    for (size_t j = 0; j < transfer.rows[i].size(); ++j) {
      rows += cell_html(transfer.rows[i][j], i == j + 1);
    }
    rows += "</tr>\n";
  }
  std::string figures;
  for (const auto& [name, value] : transfer.figures) {
    figures += fmt::format("{}{} {}", figures.empty() ? "" : ", ", escaped(name), escaped(value));
  }
  return fmt::format(
      "<h2 id=\"transfer\">What was learnt, and what was forgotten</h2>\n"
      "<p>Mean reward on each domain's test tasks after each stage, with 95 % intervals; bold "
      "where "
      "the stage taught the domain. {}.</p>\n"
      "<div class=\"table\" role=\"group\" tabindex=\"0\" aria-label=\"Rewards\"><table><thead><tr>"
      "{}</tr></thead>\n<tbody>\n{}</tbody></table></div>\n",
      figures, head, rows);
}

}  // namespace lockstep::train

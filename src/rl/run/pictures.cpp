// The figures of a run as .svg files, light or dark as the viewer is.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "rl/run/files.h"

namespace lockstep::rl {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kWidth = 760, kHeight = 420, kLeft = 56, kRight = 180, kTop = 56, kBottom = 52;
constexpr double kAcross = kWidth - kLeft - kRight, kDown = kHeight - kTop - kBottom;
constexpr const char* kStyle = R"(<style>
text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:16px;font-weight:600}.small{font-size:11px}
.grid{stroke:#ddd}.axis{stroke:#666}.bound{stroke:#444;stroke-width:1.5}.curve{fill:none;stroke-width:2}
.c0{fill:#0072b2;stroke:#0072b2}.c1{fill:#d55e00;stroke:#d55e00}.c2{fill:#009e73;stroke:#009e73}
.c3{fill:#cc79a7;stroke:#cc79a7}rect.page{fill:#fff}path.curve{fill:none}
@media(prefers-color-scheme:dark){text{fill:#eee}rect.page{fill:#181818}.grid{stroke:#333}.axis{stroke:#999}
.bound{stroke:#ccc}.c0{fill:#56b4e9;stroke:#56b4e9}.c1{fill:#e69f00;stroke:#e69f00}}
</style>)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

int colour(size_t index) { return static_cast<int>(index % 4); }

// A diagram whose horizontal axis is [0, 1]; its legend is on the right.
class Picture {
 public:
  Picture(const std::string& title, const std::string& what, double low, double high)
      : low_(low), high_(high) {
    out_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\" "
        "aria-label=\"{}\">\n<title>{}</title>\n<desc>{}</desc>\n{}\n<rect class=\"page\" "
        "width=\"100%\" height=\"100%\"/>\n",
        kWidth, kHeight, escaped(title), escaped(title), escaped(what), kStyle);
    text(kLeft, 26, title, "title");
    text(kLeft, 44, what, "small");
    for (double at = std::ceil(low * 5 - 1e-9) / 5; at <= high + 1e-9; at += 0.2) {
      const bool is_zero = std::abs(at) < 1e-9;
      segment(0, at, 1, at, is_zero ? "axis" : "grid");
      text(kLeft - 8, y(at) + 4, fmt::format("{:.1f}", is_zero ? 0 : at), "small", "end");
    }
  }

  void text(double x, double y, const std::string& text, const char* style,
            const char* anchor = "start") {
    out_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\" text-anchor=\"{}\">{}</text>\n",
                    x, y, style, anchor, escaped(text));
  }
  void segment(double x0, double y0, double x1, double y1, const char* style) {
    out_ += fmt::format("<path class=\"{}\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>\n", style, x(x0),
                        y(y0), x(x1), y(y1));
  }
  void below(double at, const std::string& name) {
    text(x(at), kHeight - kBottom + 20, name, "small", "middle");
  }
  void curve(const std::vector<std::pair<double, double>>& points, size_t index) {
    std::string path;
    for (const auto& [px, py] : points) {
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x(px), y(py));
    }
    out_ += fmt::format("<path class=\"curve c{}\" d=\"{}\"/>\n", colour(index), path);
  }
  void point(double px, double py, size_t index) {
    out_ += fmt::format("<circle class=\"c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\"/>\n",
                        colour(index), x(px), y(py));
  }
  // From 0 to `value`, with its 95 % interval where there is one.
  void bar(double from, double to, double value, const Json& interval, size_t index) {
    const double top = std::min(y(value), y(0)), tall = std::abs(y(value) - y(0));
    out_ += fmt::format(
        "<rect class=\"c{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n",
        colour(index), x(from), top, x(to) - x(from), tall);
    const double middle = (from + to) / 2;
    double above = std::max(value, 0.0);
    if (interval.is_array() && interval.size() == 2) {
      const double low = interval[0].get<double>(), high = interval[1].get<double>();
      segment(middle, low, middle, high, "bound");
      above = std::max(above, high);
    }
    text(x(middle), y(above) - 5, fmt::format("{:.2f}", value), "small", "middle");
  }
  void legend(const std::string& name, size_t index) {
    const double down = kTop + 14 + 20 * static_cast<double>(legends_++);
    out_ +=
        fmt::format("<rect class=\"c{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\"/>\n",
                    colour(index), kWidth - kRight + 16, down - 10);
    text(kWidth - kRight + 34, down, name, "small");
  }
  std::string end() { return std::move(out_) + "</svg>\n"; }

 private:
  double x(double at) const { return kLeft + at * kAcross; }
  double y(double value) const {
    const double share = (value - low_) / (high_ - low_);
    return kTop + (1 - std::clamp(share, 0.0, 1.0)) * kDown;
  }

  double low_, high_;
  int legends_ = 0;
  std::string out_;
};

std::string learning_curves(const Json& results) {
  Picture picture("Learning curves", "Mean reward of each iteration's episodes", 0, 1);
  double all = 0;
  for (const auto& stage : results.at("stages")) {
    all += static_cast<double>(stage.at("learning").at("curve").size());
  }
  double before = 0;
  size_t index = 0;
  for (const auto& stage : results.at("stages")) {
    const Json& curve = stage.at("learning").at("curve");
    const auto count = static_cast<double>(curve.size());
    std::vector<std::pair<double, double>> points;
    for (const auto& reward : curve) {
      const double at = before + static_cast<double>(points.size()) + 0.5;
      points.emplace_back(at / all, reward.get<double>());
    }
    if (before > 0) picture.segment(before / all, 0, before / all, 1, "grid");
    if (points.size() == 1) picture.point(points[0].first, points[0].second, index);
    if (points.size() > 1) picture.curve(points, index);
    if (count > 0) {
      picture.below((before + count / 2) / all, fmt::format("{} iterations", curve.size()));
    }
    picture.legend(stage.at("stage_id").get<std::string>(), index++);
    before += count;
  }
  return picture.end();
}

// What R says of a domain at row i, with its interval.
struct Rewards {
  const Json& matrix;
  double operator()(size_t i, size_t j) const { return matrix.at("R")[i][j].get<double>(); }
  Json interval(size_t i, size_t j) const {
    const auto found = matrix.find("R_ci95");
    return found == matrix.end() ? Json() : found->at(i).at(j);
  }
};

std::string stage_performance(const Json& matrix, size_t stages) {
  const Json& columns = matrix.at("columns");
  const bool is_joint = stages < columns.size();  // one stage teaches them all
  Picture picture("Stage performance",
                  is_joint ? "Mean reward on each domain's test tasks, with 95 % intervals"
                           : "Mean reward on a stage's own test tasks, with 95 % intervals",
                  0, 1);
  const Rewards reward{matrix};
  const auto count = static_cast<double>(columns.size());
  for (size_t j = 0; j < columns.size(); ++j) {
    std::vector<size_t> rows{is_joint ? 0 : j, is_joint ? stages : j + 1};
    if (!is_joint) rows.push_back(stages);
    const double begin = (static_cast<double>(j) + 0.1) / count;
    const double wide = 0.8 / count / static_cast<double>(rows.size());
    for (size_t k = 0; k < rows.size(); ++k) {
      const double from = begin + wide * static_cast<double>(k);
      picture.bar(from, from + wide * 0.9, reward(rows[k], j), reward.interval(rows[k], j), k);
    }
    picture.below((static_cast<double>(j) + 0.5) / count, columns[j].get<std::string>());
  }
  picture.legend(is_joint ? "before" : "before its stage", 0);
  picture.legend(is_joint ? "after" : "after its stage", 1);
  if (!is_joint) picture.legend("after the last stage", 2);
  return picture.end();
}

std::string retention_performance(const Json& matrix, const Json& rows) {
  Picture picture("Retention", "Mean reward on each domain's test tasks after each stage", 0, 1);
  const Rewards reward{matrix};
  const size_t count = matrix.at("R").size();
  const auto at = [&](size_t row) {
    return (static_cast<double>(row) + 0.5) / static_cast<double>(count);
  };
  for (size_t j = 0; j < matrix.at("columns").size(); ++j) {
    std::vector<std::pair<double, double>> points;
    for (size_t i = 0; i < count; ++i) {
      points.emplace_back(at(i), reward(i, j));
      picture.point(at(i), reward(i, j), j);
    }
    picture.curve(points, j);
    picture.legend(matrix.at("columns")[j].get<std::string>(), j);
  }
  for (size_t i = 0; i < count; ++i) picture.below(at(i), rows.at(i).get<std::string>());
  return picture.end();
}

std::string transfer_metrics(const Json& matrix) {
  constexpr std::array kFigures = {std::pair{"acc", "average"},
                                   std::pair{"learning_accuracy", "learning"},
                                   std::pair{"bwt", "backward"}, std::pair{"fwt", "forward"},
                                   std::pair{"forgetting", "forgetting"}};
  std::vector<std::pair<const char*, const char*>> shown;
  double low = 0;
  for (const auto& one : kFigures) {
    if (!matrix.contains(one.first) || !matrix.at(one.first).is_number()) continue;
    shown.push_back(one);
    const Json interval = matrix.value(std::string(one.first) + "_ci95", Json());
    low = std::min(low, matrix.at(one.first).get<double>());
    if (interval.is_array()) low = std::min(low, interval[0].get<double>());
  }
  Picture picture("Transfer and forgetting",
                  "Average and learning accuracy, backward and forward transfer, forgetting", low,
                  1);
  const auto count = static_cast<double>(shown.size());
  for (size_t i = 0; i < shown.size(); ++i) {
    const auto& [key, name] = shown[i];
    const double from = (static_cast<double>(i) + 0.2) / count;
    picture.bar(from, from + 0.6 / count, matrix.at(key).get<double>(),
                matrix.value(std::string(key) + "_ci95", Json()), i < 2 ? 0 : 1);
    picture.below(from + 0.3 / count, name);
  }
  picture.legend("accuracy", 0);
  picture.legend("change", 1);
  return picture.end();
}

}  // namespace

std::map<std::string, std::string> pictures(const std::string& results_text,
                                            const std::string& metrics_text) {
  if (metrics_text.empty()) return {};
  const Json results = Json::parse(results_text);
  const Json matrix = Json::parse(metrics_text).at("matrix");
  return {
      {"learning_curves.svg", learning_curves(results)},
      {"stage_performance.svg", stage_performance(matrix, matrix.at("R").size() - 1)},
      {"retention_performance.svg", retention_performance(matrix, results.at("matrix").at("rows"))},
      {"transfer_metrics.svg", transfer_metrics(matrix)}};
}

}  // namespace lockstep::rl

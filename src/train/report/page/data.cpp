#include "train/report/page/data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "train/report/ranks.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

// A screen has no more rows and columns than these to show.
constexpr size_t kMostRows = 128, kMostColumns = 256, kMostMarks = 400, kMostFurther = 12;

// Five digits, which is more than a screen shows; null for what is not a number.
std::string digits(double value) {
  return std::isfinite(value) ? fmt::format("{:.5g}", value) : "null";
}

// As escaped() has it: a chart is found by its name.
std::string quoted(const std::string& text) {
  std::string json = nlohmann::json(plain_text(text))
                         .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  // "</script>" and "<!--" end a script or change how it is read.
  for (size_t at = 0; (at = json.find('<', at)) != std::string::npos; at += 6) {
    json.replace(at, 1, "\\u003c");
  }
  return json;
}

std::string points(const Series& series) {
  std::string all = "[";
  for (const Point& point : series.points()) {
    if (all.size() > 1) all += ',';
    all += fmt::format("[{},{},{},{},{}]", point.first, point.last, digits(point.mean),
                       digits(point.least), digits(point.most));
  }
  return all + "]";
}

std::string shares(const RunHistory& run) {
  const auto& communication = run.communication_share.points();
  const auto& data = run.data_share.points();
  const auto& checkpoint = run.checkpoint_share.points();
  std::string all = "[";
  for (size_t i = 0; i < communication.size() && i < data.size() && i < checkpoint.size(); ++i) {
    if (all.size() > 1) all += ',';
    const auto share = [](const Point& point) {
      return std::isfinite(point.mean) ? std::clamp(point.mean, 0.0, 1.0) : 0.0;
    };
    const double others = share(communication[i]) + share(data[i]) + share(checkpoint[i]);
    const double scale = others > 1 ? 1 / others : 1;
    all += fmt::format("[{},{},[{},{},{},{}]]", communication[i].first, communication[i].last,
                       digits(share(checkpoint[i]) * scale), digits(share(data[i]) * scale),
                       digits(share(communication[i]) * scale), digits(1 - others * scale));
  }
  return all + "]";
}

// Of the whole run, in the order of shares(), as the summary writes them.
std::string total_shares(const RunHistory& run) {
  const Shares total = shares_of(run);
  return fmt::format(R"(["{}","{}","{}","{}"])", percent(total.checkpoint), percent(total.data),
                     percent(total.communication), percent(total.compute));
}

// The columns, joined until a screen can show them.
std::vector<RankColumn> shown_columns(const RunHistory& run) {
  std::vector<RankColumn> columns;
  const size_t together = (run.columns.size() + kMostColumns - 1) / kMostColumns;
  size_t joined = 0;
  for (const RankColumn& column : run.columns) {
    const bool joins = joined > 0 && joined < together &&
                       columns.back().working_seconds.size() == column.working_seconds.size();
    joined = joins ? joined + 1 : 1;
    if (joins) {
      columns.back().join(column);
    } else {
      columns.push_back(column);
    }
  }
  return columns;
}

// Of each group of neighbouring ranks the one that stands out: `picks` says whether the first does.
template <class Picks>
std::string groups(const std::vector<float>& ranks, size_t together, const Picks& picks) {
  std::string all = "[";
  for (size_t begin = 0; begin < ranks.size(); begin += together) {
    float one = NAN;
    for (size_t i = begin; i < std::min(begin + together, ranks.size()); ++i) {
      if (std::isfinite(ranks[i]) && (std::isnan(one) || picks(ranks[i], one))) one = ranks[i];
    }
    if (begin > 0) all += ',';
    all += std::isfinite(one) ? fmt::format("{:.4g}", one) : "null";
  }
  return all + "]";
}

std::string heat_says(const RunHistory& run, size_t together) {
  std::string text = fmt::format("How long each of {} works a step, over {}.",
                                 counted(static_cast<int64_t>(run.ranks.size()), "rank"),
                                 counted(run.last_step(), "step"));
  if (together > 1) text += fmt::format(" A row is the slowest of {} ranks.", together);
  if (run.ranks.size() < 2) return text;
  const std::vector<double> working = work_of_ranks(run);
  const size_t slowest = largest(working);
  const double others = median_without(working, slowest);
  if (others > 0) {
    text += fmt::format(" The slowest is {}, with {:.2f} times the median of the others.",
                        rank_of(run, slowest), working[slowest] / others);
  }
  return text;
}

std::string ranks(const RunHistory& run) {
  const auto columns = shown_columns(run);
  const size_t count = most_ranks(run);
  const size_t together = (count + kMostRows - 1) / kMostRows;
  std::string rows, spans, cells, memory, gpus;
  for (size_t begin = 0; begin < count; begin += together) {
    const size_t last = std::min(begin + together, count) - 1;
    rows += (rows.empty() ? "" : ",") + quoted(last == begin ? fmt::format("rank {}", begin)
                                                             : fmt::format("{}–{}", begin, last));
  }
  const bool has_gpus = knows_gpus(run);
  for (const RankColumn& column : columns) {
    const char* const comma = spans.empty() ? "" : ",";
    spans += fmt::format("{}[{},{}]", comma, column.first, column.last);
    cells += comma + groups(column.working_seconds, together, std::greater());
    memory += comma + groups(column.memory_bytes, together, std::greater());
    if (has_gpus) gpus += comma + groups(column.gpu_busy, together, std::less());
  }
  return fmt::format(
      R"("heat":{{"says":{},"rows":[{}],"columns":[{}],"cells":[{}]}},"memory":[{}],"gpu_busy":[{}])",
      quoted(heat_says(run, together)), rows, spans, cells, memory, gpus);
}

std::string marks(const RunHistory& run) {
  std::string all = "[";
  size_t count = 0;
  for (const Event& event : run.events) {
    const bool has_words = event.kind == "stage" || event.kind == "restart";
    if (!has_words && event.kind != "warning" && event.kind != "fault") continue;
    if (++count > kMostMarks) break;
    all += fmt::format("{}{{\"kind\":\"{}\",\"step\":{},\"text\":{}}}", count > 1 ? "," : "",
                       event.kind, event.step, quoted(has_words ? event.text : ""));
  }
  return all + "]";
}

std::string series_of(const RunHistory& run) {
  std::string all;
  const auto add = [&all](const std::string& name, const Series& series) {
    if (series.empty()) return;
    all += (all.empty() ? "" : ",") + quoted(name) + ":" + points(series);
  };
  add("loss", run.loss);
  add("learning_rate", run.learning_rate);
  add("gradient_norm", run.gradient_norm);
  add("samples_per_second", run.samples_per_second);
  add("step_seconds", run.step_seconds);
  for (const auto& [name, title, series] : further_series(run)) add(name, *series);
  return all;
}

}  // namespace

size_t most_ranks(const RunHistory& run) {
  size_t most = run.ranks.size();
  for (const RankColumn& column : run.columns) most = std::max(most, column.working_seconds.size());
  return most;
}

std::string label_of(const RunHistory& run, size_t folders) {
  // "runs/a/metrics.jsonl" is the run a.
  std::string path = run.path;
  const auto last = [&path](size_t parts) {
    size_t begin = path.size() + 1;
    for (; parts > 0 && begin != 0; --parts) {
      const size_t slash = begin < 2 ? std::string::npos : path.rfind('/', begin - 2);
      begin = slash == std::string::npos ? 0 : slash + 1;
    }
    return path.substr(begin);
  };
  if (last(1) == "metrics.jsonl") path = path.size() > 14 ? path.substr(0, path.size() - 14) : "";
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (!path.empty() && last(1) != "." && last(1) != "..") return last(folders);
  return run.starts.empty() || run.starts.front().name.empty() ? "run" : run.starts.front().name;
}

std::vector<std::string> labels_of(const std::vector<RunHistory>& runs) {
  constexpr size_t kMostFolders = 16;
  std::vector<std::string> labels(runs.size());
  std::vector<size_t> folders(runs.size(), 1);
  for (size_t round = 1; round <= kMostFolders; ++round) {
    std::map<std::string, size_t> count;
    for (size_t i = 0; i < runs.size(); ++i) {
      labels[i] = label_of(runs[i], folders[i]);
      ++count[labels[i]];
    }
    for (size_t i = 0; i < runs.size(); ++i) folders[i] += count[labels[i]] > 1 ? 1 : 0;
  }
  return labels;
}

std::vector<FurtherSeries> further_series(const RunHistory& run) {
  std::vector<FurtherSeries> all;
  const auto add = [&all](const std::map<std::string, Series>& many, const char* kind) {
    size_t count = 0;
    for (const auto& [name, series] : many) {
      if (++count > kMostFurther) break;
      all.push_back({fmt::format("{}: {}", kind, name), name, &series});
    }
  };
  add(run.evaluations, "evaluation");
  add(run.values, "value");
  return all;
}

std::string page_data(const std::vector<RunHistory>& runs) {
  std::string all = "{\"runs\":[";
  const auto labels = labels_of(runs);
  for (size_t i = 0; i < runs.size(); ++i) {
    const RunHistory& run = runs[i];
    all += fmt::format("{}{{\"label\":{},\"series\":{{{}}}", i > 0 ? "," : "", quoted(labels[i]),
                       series_of(run));
    if (i == 0) {
      all += fmt::format(",\"marks\":{},\"shares\":{},\"total_shares\":{},{}", marks(run),
                         shares(run), total_shares(run), ranks(run));
    }
    all += "}";
  }
  return all + "]}";
}

}  // namespace lockstep::train

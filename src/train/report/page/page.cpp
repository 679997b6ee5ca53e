// The page: what is said in words and tables is here, what is drawn in page/report.js.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <set>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/train/run_report.h"
#include "train/report/losses.h"
#include "train/report/page/assets.h"
#include "train/report/page/data.h"
#include "train/report/page/transfer.h"
#include "train/report/ranks.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

constexpr size_t kMostTableRows = 256, kMostSettings = 400;
constexpr const char* kNothingYet = "<p class=\"muted\">There is no report yet.</p>\n";

std::string date(double unix_seconds) {
  // Up to the year 9999.
  const auto seconds = static_cast<std::time_t>(std::clamp(unix_seconds, 0.0, 253402300799.0));
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[64] = {};
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts);
  return text;
}

// A figure and its unit stay on one line.
std::string unbroken(const std::string& text) {
  std::string html = escaped(text);
  for (const char* const unit : {" %", " ms", " us", " s ", " MB", " GB"}) {
    for (size_t at = 0; (at = html.find(unit, at)) != std::string::npos; at += 2) {
      if (at > 0 && html[at - 1] >= '0' && html[at - 1] <= '9') html.replace(at, 1, "\u00a0");
    }
  }
  return html;
}

std::string findings(const RunHistory& run) {
  std::string html = "<ul class=\"findings\">\n";
  for (const Finding& finding : findings_of(run)) {
    const bool bad = finding.tone == Finding::Tone::Bad, good = finding.tone == Finding::Tone::Good;
    html +=
        fmt::format("<li class=\"{}\"><span class=\"mark\">{}</span><strong>{}</strong> {}</li>\n",
                    bad    ? "bad"
                    : good ? "good"
                           : "plain",
                    bad    ? "▲ look at this"
                    : good ? "✓ fine"
                           : "● note",
                    unbroken(finding.title), unbroken(finding.text));
  }
  return html + "</ul>\n";
}

// A chart that report.js draws.
std::string chart(const std::string& name, const std::string& title, const std::string& says,
                  const char* wide = "") {
  return fmt::format(
      "<figure class=\"{}\"><figcaption><h3>{}</h3><p>{}</p></figcaption>"
      "<div class=\"plot\" data-chart=\"{}\" data-title=\"{}\"></div></figure>\n",
      wide, escaped(title), escaped(says), escaped(name), escaped(title));
}

bool any_has(const std::vector<RunHistory>& runs, Series RunHistory::*series) {
  return std::any_of(runs.begin(), runs.end(),
                     [&](const auto& run) { return !(run.*series).empty(); });
}

std::string charts(const std::vector<RunHistory>& runs) {
  const RunHistory& run = runs.front();
  std::string html;
  const auto add = [&](Series RunHistory::*series, const char* name, const char* title,
                       const char* says) {
    if (any_has(runs, series)) html += chart(name, title, says);
  };
  add(&RunHistory::loss, "loss", "Loss",
      "Of training, the mean of the steps since the report before, over all ranks; the band has "
      "the "
      "least and the most of neighbouring reports.");
  add(&RunHistory::samples_per_second, "throughput", "Throughput (samples/s)",
      "On all ranks together.");
  add(&RunHistory::learning_rate, "learning_rate", "Learning rate",
      "Of the first parameter group.");
  add(&RunHistory::gradient_norm, "gradient_norm", "Gradient norm", "Before it was clipped.");
  for (const auto& [name, title, series] : further_series(run)) {
    if (!series->empty()) {
      const bool evaluated = name.starts_with("evaluation");
      html += chart(name, evaluated ? "Evaluation: " + title : title,
                    evaluated ? "Of the data that is held out." : "As the program reports it.");
    }
  }
  if (html.empty()) return kNothingYet;
  return "<div class=\"charts\">\n" + html + "</div>\n";
}

std::string time_charts(const std::vector<RunHistory>& runs) {
  const RunHistory& run = runs.front();
  std::string html;
  if (most_ranks(run) > 1 && !run.columns.empty()) {
    html += chart("heat", "Work per rank",
                  "How long each rank works a step without waiting for others, against the median "
                  "of the ranks at "
                  "that time. A row of one strong colour is a rank that is slow all the time.",
                  "wide");
  }
  if (!run.columns.empty()) {
    html += chart("shares", "Where the time of a step goes",
                  "The mean over ranks. Communication includes waiting for slower ranks.");
  }
  if (any_has(runs, &RunHistory::step_seconds)) {
    html += chart("step_time", "Time of a step", "The mean over ranks.");
  }
  if (!run.columns.empty()) {
    html += chart("memory", "Memory per rank", "Resident memory of each rank's process.", "wide");
  }
  if (knows_gpus(run)) {
    html += chart("gpu_busy", "GPU use per rank",
                  "The share of the time in which the GPU computes, for whichever process; at most "
                  "one second before each report is looked at.",
                  "wide");
  }
  if (html.empty()) return kNothingYet;
  return "<div class=\"charts\">\n" + html + "</div>\n";
}

std::string table(const std::string& name, const std::string& head, const std::string& body) {
  return fmt::format(
      "<div class=\"table\" role=\"group\" tabindex=\"0\" "
      "aria-label=\"{}\"><table><thead><tr>{}</tr></thead>\n"
      "<tbody>\n{}</tbody></table></div>\n",
      escaped(name), head, body);
}

std::string heading(const std::string& text, const char* kind = "") {
  return fmt::format("<th scope=\"col\" class=\"{}\">{}</th>", kind, text);
}

// The shares of a rank's time as a bar; the table's figures say the same in digits.
std::string bar(const RankTotals& rank) {
  if (rank.step_seconds <= 0) return "";
  const auto part = [&](const char* kind, double seconds) {
    return fmt::format("<i style=\"width:{:.1f}%;background:var(--{})\"></i>",
                       100 * std::clamp(seconds / rank.step_seconds, 0.0, 1.0), kind);
  };
  const double compute =
      rank.step_seconds - rank.communication_seconds - rank.data_seconds - rank.checkpoint_seconds;
  return "<div class=\"bar\" aria-hidden=\"true\">" + part("compute", compute) +
         part("communication", rank.communication_seconds) + part("data", rank.data_seconds) +
         part("checkpoint", rank.checkpoint_seconds) + "</div>";
}

std::string ranks_table(const RunHistory& run) {
  if (run.ranks.empty()) return "<p class=\"muted\">The log has no figures of ranks.</p>\n";
  std::vector<std::pair<double, size_t>> order;
  const std::vector<double> working = work_of_ranks(run);
  for (size_t i = 0; i < working.size(); ++i) order.emplace_back(-working[i], i);
  std::string says;
  if (order.size() > kMostTableRows) {
    // The slowest ones are those that one looks for.
    std::sort(order.begin(), order.end());
    order.resize(kMostTableRows);
    says = fmt::format("<p class=\"muted\">The {} slowest of {} ranks.</p>\n", kMostTableRows,
                       run.ranks.size());
  }
  const bool has_gpus = knows_gpus(run);
  const auto gpu = [has_gpus](const RankTotals& rank) {
    if (!has_gpus) return std::string();
    return fmt::format("<td class=\"n\">{}</td>",
                       rank.gpu_reports == 0
                           ? "—"
                           : percent(rank.gpu_busy / static_cast<double>(rank.gpu_reports)));
  };
  std::string slow, rows;  // those that one looks for come first
  for (const auto& [unused, i] : order) {
    const RankTotals& rank = run.ranks[i];
    const double others = run.ranks.size() > 1 ? median_without(working, i) : 0;
    const double times = others > 0 ? working[i] / others : 1;
    const auto share = [&](double seconds) {
      return percent(rank.step_seconds > 0 ? seconds / rank.step_seconds : 0);
    };
    const bool is_slow = times > 1.25;
    (is_slow ? slow : rows) += fmt::format(
        "<tr class=\"{}\"><th scope=\"row\">{}</th><td class=\"n\">{}</td><td "
        "class=\"n\">{:.2f}</td><td class=\"n\">{}</td>"
        "<td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td>{}</tr>\n",
        is_slow ? "bad" : "", escaped(rank_of(run, i)), short_time(working[i]), times,
        share(rank.communication_seconds), share(rank.data_seconds), share(rank.checkpoint_seconds),
        bar(rank), memory_text(static_cast<double>(rank.most_memory)), gpu(rank));
  }
  return says +
         table("Ranks",
               heading("rank") + heading("works a step", "n") + heading("times the others", "n") +
                   heading("communication", "n") + heading("data", "n") + heading("saving", "n") +
                   heading("time <span class=\"sr\">as a bar</span>") +
                   heading("most memory", "n") + (has_gpus ? heading("GPU in use", "n") : ""),
               slow + rows);
}

std::string events_table(const RunHistory& run) {
  if (run.events.empty()) return "<p class=\"muted\">Nothing happened besides training.</p>\n";
  std::string rows;
  for (const Event& event : run.events) {
    const bool bad = event.kind == "warning" || event.kind == "fault";
    rows += fmt::format(
        "<tr class=\"{}\"><td class=\"n\">{}</td><td>{}</td><td>{}</td><td>{}{}</td></tr>\n",
        bad ? "bad" : "", with_commas(event.step), escaped(kind_text(event.kind)),
        event.rank < 0 ? "" : escaped(rank_of(run, static_cast<size_t>(event.rank))),
        escaped(event.text),
        event.advice.empty() ? ""
                             : "<br><span class=\"muted\">" + escaped(event.advice) + "</span>");
  }
  const std::string left_out =
      run.events_left_out > 0
          ? fmt::format("<p class=\"muted\">{} in the middle are left out.</p>\n",
                        with_commas(run.events_left_out))
          : "";
  return left_out +
         table("Events", heading("step", "n") + heading("what") + heading("rank") + heading("text"),
               rows);
}

// A path as an address.
std::string address_of(const std::string& path) {
  std::string text;
  for (const char letter : path) {
    const bool is_plain = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
                          (letter >= '0' && letter <= '9') ||
                          std::string_view("/._-~").find(letter) != std::string_view::npos;
    text += is_plain ? std::string(1, letter)
                     : fmt::format("%{:02X}", static_cast<unsigned char>(letter));
  }
  // A colon in the first part would end the name of a protocol.
  return path.starts_with('/') ? "file://" + text : text;
}

std::string trace_link(const std::string& path) {
  if (path.empty()) return "";
  return fmt::format(
      "<p>What all ranks did in some of the steps: <a href=\"{}\">{}</a>, to be opened in Perfetto "
      "(ui.perfetto.dev) or about:tracing.</p>\n",
      address_of(path), escaped(path));
}

// A name that may be broken where its parts end.
std::string breakable(const std::string& name) {
  std::string html;
  for (const char letter : escaped(name)) {
    html += letter;
    if (letter == '.' || letter == '_') html += "<wbr>";
  }
  return html;
}

// One row a name, one column a run; names whose values differ come first.
std::string settings(const std::vector<RunHistory>& runs,
                     std::map<std::string, std::string> RunStart::*member, const char* name) {
  std::set<std::string> names;
  std::vector<std::map<std::string, std::string>> values;
  for (const RunHistory& run : runs) {
    values.push_back(run.starts.empty() ? std::map<std::string, std::string>{}
                                        : run.starts.back().*member);
    for (const auto& [key, value] : values.back()) names.insert(key);
  }
  if (names.empty())
    return fmt::format("<p class=\"muted\">The log has no {}.</p>\n", escaped(name));
  std::string differing, alike;
  size_t count = 0, different = 0;
  for (const std::string& key : names) {
    std::string cells;
    bool differs = false;
    for (const auto& of : values) {
      const auto found = of.find(key);
      const auto first = values.front().find(key);
      const std::string value = found == of.end() ? "—" : found->second;
      differs |= value != (first == values.front().end() ? "—" : first->second);
      cells += "<td>" + escaped(value) + "</td>";
    }
    different += differs;
    if (++count > kMostSettings) continue;
    (differs ? differing : alike) +=
        fmt::format("<tr class=\"{}\"><th scope=\"row\">{}</th>{}</tr>\n", differs ? "differs" : "",
                    breakable(key), cells);
  }
  std::string head = heading("name");
  for (const auto& label : labels_of(runs)) {
    head += heading(runs.size() > 1 ? escaped(label) : "value");
  }
  const std::string says =
      runs.size() == 1
          ? ""
          : fmt::format("<p class=\"muted\">{} of {} differ; these come first, in bold.</p>\n",
                        different, names.size());
  return says + table(name, head, differing + alike);
}

// Which run did how well.
std::string comparison(const std::vector<RunHistory>& runs) {
  std::string rows;
  const auto labels = labels_of(runs);
  for (size_t i = 0; i < runs.size(); ++i) {
    const RunHistory& run = runs[i];
    const Shares shares = shares_of(run);
    const std::vector<Point> loss = losses_of(run);
    rows += fmt::format(
        "<tr><th scope=\"row\">{}</th><td class=\"n\">{}</td><td class=\"n\">{}</td><td "
        "class=\"n\">{}</td><td class=\"n\">{}</td>"
        "<td class=\"n\">{}</td><td>{}</td></tr>\n",
        escaped(labels[i]), with_commas(run.last_step()), escaped(long_time(run.working_seconds())),
        loss.empty() ? "—" : figure(loss.back().mean),
        shares.step > 0 ? short_time(shares.step) : "—", run.ranks.size(),
        escaped(run.end ? run.end->outcome : "no end in the log"));
  }
  return "<h2 id=\"compare\">The runs beside each other</h2>\n" +
         table("Runs",
               heading("run") + heading("steps", "n") + heading("time", "n") +
                   heading("last loss", "n") + heading("a step", "n") + heading("ranks", "n") +
                   heading("end"),
               rows);
}

}  // namespace

std::string report_page(const std::vector<RunHistory>& runs, const PageOptions& options) {
  if (runs.empty()) throw ConfigError("[report] there is no run to report about");
  const RunHistory& run = runs.front();
  const std::string label = labels_of(runs).front();
  const std::string name = run.starts.empty() ? "" : run.starts.front().name;
  // Before the first report the log has no figures of ranks.
  const size_t told = run.starts.empty() ? 1 : static_cast<size_t>(run.starts.back().ranks);
  const size_t ranks = run.ranks.empty() ? told : run.ranks.size();
  const std::string line =
      fmt::format("{}{} rank{}, {}, started {}", name.empty() ? "" : name + ": ", ranks,
                  ranks > 1 ? "s" : "", counted(run.last_step(), "step"), date(run.first_time));
  std::string page = R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
)";
  page += fmt::format("<title>{} · Lockstep report</title>\n<style>\n{}</style>\n</head>\n",
                      escaped(label), kReportCss);
  page += fmt::format(
      "<body>\n<a class=\"skip\" href=\"#summary\">To the summary</a>\n<header>\n<h1>{}</h1>\n<p "
      "class=\"muted\">{}</p>\n"
      "<nav aria-label=\"Sections\"><a href=\"#summary\">Summary</a>{} <a "
      "href=\"#learning\">Learning</a> <a href=\"#time\">Time and "
      "memory</a> <a href=\"#ranks\">Ranks</a> <a href=\"#events\">Events</a> <a "
      "href=\"#config\">Configuration</a> "
      "<a href=\"#environment\">Environment</a></nav>\n</header>\n<main>\n",
      escaped(label), escaped(line), runs.size() > 1 ? " <a href=\"#compare\">Comparison</a>" : "");
  page += "<h2 id=\"summary\">Summary</h2>\n" + findings(run);
  if (runs.size() > 1) page += comparison(runs);
  page +=
      "<noscript><p>The charts need JavaScript; the summary and the tables do "
      "not.</p></noscript>\n";
  page += "<h2 id=\"learning\">Did it learn?</h2>\n" + charts(runs);
  page += transfer_section(run);
  page += "<h2 id=\"time\">Where did time and memory go?</h2>\n" + time_charts(runs);
  page += trace_link(options.trace);
  page += "<h2 id=\"ranks\">Ranks</h2>\n" + ranks_table(run);
  page += "<h2 id=\"events\">What happened</h2>\n" + events_table(run);
  page +=
      "<h2 id=\"config\">Configuration</h2>\n" + settings(runs, &RunStart::config, "configuration");
  page += "<h2 id=\"environment\">Environment</h2>\n" +
          settings(runs, &RunStart::environment, "environment");
  page += "<p class=\"sr\" id=\"live\" aria-live=\"polite\"></p>\n</main>\n";
  page += fmt::format(
      "<footer>Made by lockstep report from {}. Vertical lines in charts: dashed where the run was "
      "restarted, dotted where something was warned of, solid where a stage began.</footer>\n",
      escaped(run.path));
  page += "<script type=\"application/json\" id=\"data\">" + page_data(runs) + "</script>\n";
  page += fmt::format("<script>\n{}</script>\n</body>\n</html>\n", kReportJs);
  return page;
}

}  // namespace lockstep::train

// The lines of `lockstep top`.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lockstep/train/progress_line.h"
#include "train/report/page/data.h"
#include "train/report/ranks.h"
#include "train/report/terminal/terminal.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

constexpr size_t kLongText = 300;  // bytes
// A log is silent when nothing has come for this many times the longest wait for a report, and at
// least this many seconds; before the first report, this many.
constexpr double kWaits = 3, kLeastSilence = 10, kFirstSilence = 60;

// The loss so far as a row of blocks; '.' where it was not a number.
std::string sparkline(const Series& series, size_t width) {
  const auto& points = series.points();
  if (points.size() < 2) return "";
  const size_t shown = std::min(width, points.size());
  double low = INFINITY, high = -INFINITY;
  std::vector<double> values;
  for (size_t i = 0; i < shown; ++i) {
    const double value = points[i * (points.size() - 1) / (shown - 1 == 0 ? 1 : shown - 1)].mean;
    values.push_back(value);
    if (std::isfinite(value)) low = std::min(low, value), high = std::max(high, value);
  }
  static constexpr const char* kBlocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::string line;
  for (const double value : values) {
    const double height = high > low ? (value - low) / (high - low) : 0;
    line +=
        std::isfinite(value) ? kBlocks[static_cast<size_t>(std::clamp(height, 0.0, 1.0) * 7)] : ".";
  }
  return line;
}

std::string bar(const RankFigures& rank, size_t width) {
  std::string text;
  const auto part = [&](double seconds, char letter) {
    const double share = rank.step_seconds > 0 ? seconds / rank.step_seconds : 0;
    const auto wanted =
        static_cast<size_t>(std::lround(std::clamp(share, 0.0, 1.0) * static_cast<double>(width)));
    text += std::string(std::min(wanted, width - text.size()), letter);
  };
  part(rank.compute_seconds(), '#');
  part(rank.communication_seconds, '=');
  part(rank.data_seconds, 'd');
  part(rank.checkpoint_seconds, 's');
  return text + std::string(width - text.size(), ' ');
}

// Of a step so far, with evaluations and checkpoints between steps; 0: not known.
double step_seconds(const RunHistory& run) {
  if (!run.last || run.longest_wait <= 0 || run.starts.empty()) return 0;
  const int64_t made = run.last->step - std::max<int64_t>(run.starts.back().resumed_at, 0);
  return made > 0 ? run.last->seconds / static_cast<double>(made) : 0;
}

// What a log that has become silent may mean; empty for one that has not.
std::string silence(const RunHistory& run, double now) {
  const double age = now - run.last_time;
  const double usual =
      run.longest_wait > 0 ? std::max(kLeastSilence, kWaits * run.longest_wait) : kFirstSilence;
  if (run.end || run.last_time <= 0 || age <= usual) return "";
  const std::string before =
      run.longest_wait > 0
          ? fmt::format(" (before, at most {} from report to report)", long_time(run.longest_wait))
          : "";
  return fmt::format(
      "nothing new for {}{}: the run was killed, or it evaluates, saves or hangs, or clocks differ",
      long_time(age), before);
}

// The line without what is beyond the last column but one; commands for colours stay.
std::string fitted(const std::string& line, size_t width) {
  std::string all;
  size_t columns = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\x1b') {
      const size_t end = std::min(line.find('m', i), line.size() - 1);
      all += line.substr(i, end + 1 - i);
      i = end;
      continue;
    }
    const bool continues = (static_cast<unsigned char>(line[i]) & 0xc0) == 0x80;  // UTF-8
    if (!continues) ++columns;
    if (columns < width) all += line[i];
  }
  return all;
}

int rows_of(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

// A table of the slowest ranks, in at most `most_rows` rows, but of one rank at least.
std::string rank_table(const StepReport& last, const TextStyle& style, int width, int most_rows) {
  constexpr int kWithMemory = 41, kWithBar = 55, kOther = 50;  // columns; the last one stays empty
  const auto line_of = [width](const std::string& figures, const std::string& memory,
                               const std::string& parts) {
    return figures + (width >= kWithMemory ? fmt::format("{:>11}", memory) : "") +
           (width >= kWithBar ? "  " + parts : "");
  };
  const auto room = static_cast<size_t>(std::clamp(width - kOther, 10, 60));
  const std::string head = line_of(fmt::format("{:<10}{:>11}{:>8}", "rank", "works", "times"),
                                   "memory", "#compute =communication data saving");
  std::string table =
      "\n" + colored(fitted(head, static_cast<size_t>(width)), Color::Dim, style) + "\n";
  std::vector<double> working;
  for (const auto& rank : last.ranks) working.push_back(rank.working_seconds());
  std::vector<size_t> order(working.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (std::ssize(order) > most_rows - 2) {  // and a line about the others
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return working[a] > working[b]; });
    order.resize(std::min(order.size(), static_cast<size_t>(std::max(1, most_rows - 3))));
  }
  for (const size_t i : order) {
    const double others = working.size() > 1 ? median_without(working, i) : 0;
    const double times = others > 0 ? working[i] / others : 1;
    const std::string line =
        line_of(fmt::format("{:<10}{:>11}{:>7.2f}x", i, short_time(working[i]), times),
                memory_text(static_cast<double>(last.ranks[i].memory_bytes)),
                fmt::format("[{}]", bar(last.ranks[i], room)));
    table += (times > 1.25 ? colored(line, Color::Yellow, style) : line) + "\n";
  }
  const auto more = static_cast<int64_t>(working.size() - order.size());
  if (more > 0)
    table += fmt::format("({} {} faster)\n", counted(more, "more rank"), more == 1 ? "is" : "are");
  return table;
}

// What was last warned of.
std::string warning_lines(const RunHistory& run, const TextStyle& style, int width) {
  const Event* warning = nullptr;
  for (const Event& event : run.events) {
    if (event.kind == "warning" || event.kind == "fault" || event.kind == "restart")
      warning = &event;
  }
  if (warning == nullptr) return "";
  const std::string head = fmt::format("last {} (step {}):", printable(kind_text(warning->kind)),
                                       with_commas(warning->step));
  const std::string text =
      wrapped(head + " " + printable(shortened(warning->text, kLongText)), width, 4);
  const size_t end = text.starts_with(head) ? head.size() : 0;
  return "\n" + colored(text.substr(0, end), Color::Yellow, style) + text.substr(end) + "\n";
}

}  // namespace

std::string run_screen(const RunHistory& run, const TextStyle& style, int most_lines, double now) {
  const int width = style.width > 0 ? style.width : 100;
  std::string screen;
  const std::string name = run.starts.empty() ? "" : run.starts.back().name;
  std::string first = printable(label_of(run));
  if (!name.empty() && name != first) first += ": " + printable(name);
  std::string state = !run.end ? "" : run.end->failed ? "  failed" : "  ended";
  // Preempted, stopped, early stopping: why.
  if (run.end && !run.end->failed && !run.end->outcome.empty() && run.end->outcome != "finished") {
    state += ": " + printable(shortened(run.end->outcome, kLongText));
  }
  const auto columns = static_cast<size_t>(width);
  if (style.width > 0) first = fitted(first, columns - std::min(state.size(), columns / 2));
  screen += colored(first, Color::Bold, style) +
            colored(state, run.end && run.end->failed ? Color::Red : Color::Green, style) + "\n";
  if (const std::string text = silence(run, now); !text.empty()) {
    screen += colored(wrapped(text, width, 4), Color::Yellow, style) + "\n";
  }
  const std::string warning = warning_lines(run, style, width);
  if (!run.last) {
    screen += "no report yet\n";
  } else {
    const StepReport& last = *run.last;
    // Of a run that has ended nothing is left.
    const int64_t total = run.starts.empty() || run.end ? 0 : run.starts.back().total_steps;
    screen +=
        progress_line(last, {.steps = total, .step_seconds = step_seconds(run)}, style) + "\n";
    const std::string curve = sparkline(run.loss, static_cast<size_t>(std::max(10, width - 8)));
    if (!curve.empty()) screen += "loss  " + curve + "\n";
    if (!last.ranks.empty()) {
      screen += rank_table(last, style, width, most_lines - rows_of(screen) - rows_of(warning));
    }
  }
  screen += warning;
  std::string all;
  for (size_t begin = 0; begin < screen.size() && most_lines > 0; --most_lines) {
    const size_t end = screen.find('\n', begin);
    const std::string line = screen.substr(begin, end - begin);
    all += (style.width > 0 ? fitted(line, columns) : line) + "\n";
    begin = end + 1;
  }
  return all;
}

}  // namespace lockstep::train

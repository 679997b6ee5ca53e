#include "lockstep/train/progress_line.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "lockstep/core/environment.h"
#include "train/report/ranks.h"
#include "train/report/terminal/terminal.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

constexpr double kSlow = 1.1;

bool is_pipe(int descriptor) {
  struct stat status {};
  return fstat(descriptor, &status) == 0 && S_ISFIFO(status.st_mode);
}

struct LinePart {
  std::string text;
  int weight;  // the more, the less likely it is left out
  Color color;
  bool fits = false;
};

// The parts that the terminal has room for, in their order.
std::string line_of(std::vector<LinePart> parts, const TextStyle& style) {
  // The weightiest first, and of equal ones the first.
  std::vector<LinePart*> order;
  for (LinePart& part : parts) order.push_back(&part);
  std::stable_sort(order.begin(), order.end(),
                   [](const LinePart* a, const LinePart* b) { return a->weight > b->weight; });
  size_t length = 0;
  for (LinePart* const part : order) {
    const size_t more = part->text.size() + (length > 0 ? 2 : 0);
    if (style.width > 0 && length + more >= static_cast<size_t>(style.width)) continue;
    part->fits = true;
    length += more;
  }
  std::string line;
  for (const LinePart& part : parts) {
    if (!part.fits) continue;
    if (!line.empty()) line += "  ";
    line += part.color == Color::None ? part.text : colored(part.text, part.color, style);
  }
  return line;
}

}  // namespace

bool is_terminal(int descriptor) {
  const char* const term = std::getenv("TERM");
  return isatty(descriptor) == 1 && (term == nullptr || std::string_view(term) != "dumb");
}

TextStyle TextStyle::of_file(int descriptor) {
  const char* const no_color = std::getenv("NO_COLOR");
  TextStyle style{.width = 0, .color = no_color == nullptr || *no_color == '\0'};
  if (is_terminal(descriptor)) {
    winsize size{};
    const bool known = ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    style.width = known ? size.ws_col : 80;
  } else if (is_pipe(descriptor)) {
    style.width = static_cast<int>(env_int("LOCKSTEP_COLUMNS", 0, 1 << 15).value_or(0));
  }
  style.rewrites = style.width > 0;
  style.color &= style.rewrites;
  return style;
}

std::string colored(const std::string& text, Color color, const TextStyle& style) {
  if (!style.color || text.empty()) return text;
  return fmt::format("\x1b[{}m{}\x1b[0m", static_cast<int>(color), text);
}

std::string printable(std::string_view text) {
  std::string safe = plain_text(text);
  std::replace(safe.begin(), safe.end(), '\n', ' ');
  return safe;
}

std::string progress_line(const StepReport& report, const RunExtent& extent,
                          const TextStyle& style) {
  std::vector<LinePart> parts;
  const auto add = [&parts](std::string text, int weight, Color color = Color::None) {
    parts.push_back({std::move(text), weight, color});
  };
  if (!extent.stage.empty()) add("stage " + printable(extent.stage), 3);
  add(fmt::format("epoch {}", report.epoch + 1) +
          (extent.epochs > 0 ? fmt::format("/{}", extent.epochs) : ""),
      4);
  if (extent.steps > 0) {
    const double share = static_cast<double>(report.step) / static_cast<double>(extent.steps);
    add(fmt::format("step {}/{}", with_commas(report.step), with_commas(extent.steps)), 10,
        Color::Bold);
    add(fmt::format("{:.0f} %", std::floor(100 * std::min(share, 1.0))), 5);
  } else {
    add(fmt::format("step {}", with_commas(report.step)), 10, Color::Bold);
  }
  if (const auto& loss = report.shown_loss()) {
    add("loss " + steady_figure(*loss), 9, std::isfinite(*loss) ? Color::None : Color::Red);
  }
  if (report.learning_rate) add("lr " + figure(*report.learning_rate), 2);
  if (report.gradient_norm) add("norm " + figure(*report.gradient_norm), 1);
  if (const double speed = report.samples_per_second; speed > 0) {
    add((speed < 10 ? figure(speed)
                    : with_commas(static_cast<int64_t>(std::round(std::min(speed, 1e15))))) +
            " samples/s",
        7);
  }
  double time = extent.step_seconds;
  if (time <= 0) {
    for (const auto& rank : report.ranks) time = std::max(time, rank.step_seconds);
  }
  if (extent.steps > report.step && time > 0) {
    const auto steps = static_cast<double>(extent.steps - report.step);
    add(long_time((time + extent.pause_seconds) * steps) + " left", 8, Color::Green);
  }
  if (report.ranks.size() > 1) {
    std::vector<double> working;
    for (const auto& rank : report.ranks) working.push_back(rank.working_seconds());
    const size_t slowest = largest(working);
    const double others = median_without(working, slowest);
    if (others > 0 && working[slowest] > kSlow * others) {
      add(fmt::format("slowest: rank {} ({:.1f}x)", slowest, working[slowest] / others), 6,
          Color::Yellow);
    }
  }
  for (const auto& [name, value] : report.values) add(printable(name) + " " + figure(value), 0);
  return line_of(std::move(parts), style);
}

std::string warning_text(const Event& event, const TextStyle& style) {
  std::string words = printable(event.text);
  if (!event.advice.empty()) words += ". " + printable(event.advice);
  return colored("warning:", Color::Yellow, style) + " " + wrapped(words, style.width, 9);
}

std::string wrapped(const std::string& text, int width, size_t indent) {
  if (width <= 0) return text;
  const size_t room = std::max<size_t>(static_cast<size_t>(width), indent + 20) - 1;
  std::string all;
  size_t column = indent;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const size_t length = end - begin;
    if (begin > 0) {
      const bool fits = column + 1 + length <= room;
      all += fits ? " " : "\n" + std::string(indent, ' ');
      column = fits ? column + 1 : indent;
    }
    all += text.substr(begin, length);
    column += length;
    begin = end + 1;
  }
  return all;
}

}  // namespace lockstep::train

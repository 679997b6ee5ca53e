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
#include "lockstep/core/error.h"
#include "train/report/ranks.h"
#include "train/report/terminal.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

constexpr double kSlow = 1.1;

bool is_pipe(int descriptor) {
  struct stat status {};
  return fstat(descriptor, &status) == 0 && S_ISFIFO(status.st_mode);
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
  if (style.width == 0) style.color = false;
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

std::string progress_line(const StepReport& report, int64_t total_steps, const TextStyle& style) {
  struct Part {
    std::string text;
    Color color = Color::None;
  };
  std::vector<Part> parts;
  const auto add = [&parts](std::string text, Color color = Color::None) {
    parts.push_back({std::move(text), color});
  };
  if (total_steps > 0) {
    const double share = static_cast<double>(report.step) / static_cast<double>(total_steps);
    add(fmt::format("step {}/{}", with_commas(report.step), with_commas(total_steps)), Color::Bold);
    add(fmt::format("{:.0f} %", std::floor(100 * std::min(share, 1.0))));
  } else {
    add(fmt::format("step {}", with_commas(report.step)), Color::Bold);
  }
  if (report.loss) {
    add("loss " + figure(*report.loss), std::isfinite(*report.loss) ? Color::None : Color::Red);
  }
  double time = 0;  // of a step
  for (const auto& rank : report.ranks) time = std::max(time, rank.step_seconds);
  if (report.samples_per_second > 0) {
    add(with_commas(static_cast<int64_t>(std::min(report.samples_per_second, 1e15))) +
        " samples/s");
  }
  if (total_steps > report.step && time > 0) {
    add(long_time(time * static_cast<double>(total_steps - report.step)) + " left", Color::Green);
  }
  if (report.ranks.size() > 1) {
    std::vector<double> working;
    for (const auto& rank : report.ranks) working.push_back(rank.working_seconds());
    const size_t slowest = largest(working);
    const double others = median_without(working, slowest);
    if (others > 0 && working[slowest] > kSlow * others) {
      add(fmt::format("slowest: rank {} ({:.1f}x)", slowest, working[slowest] / others),
          Color::Yellow);
    }
  }
  if (report.learning_rate) add("lr " + figure(*report.learning_rate));
  if (report.gradient_norm) add("norm " + figure(*report.gradient_norm));
  add(fmt::format("epoch {}", report.epoch + 1));
  for (const auto& [name, value] : report.values) add(printable(name) + " " + figure(value));

  std::string line;
  size_t length = 0;
  for (const Part& part : parts) {
    const size_t more = part.text.size() + (length > 0 ? 2 : 0);
    if (style.width > 0 && length + more >= static_cast<size_t>(style.width)) break;
    if (length > 0) line += "  ";
    line += part.color == Color::None ? part.text : colored(part.text, part.color, style);
    length += more;
  }
  return line;
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

#include "lockstep/train/progress_line.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "train/report/ranks.h"
#include "train/report/terminal.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

constexpr double kSlow = 1.1;

}  // namespace

bool is_terminal(int descriptor) {
  const char* const term = std::getenv("TERM");
  return isatty(descriptor) == 1 && (term == nullptr || std::string_view(term) != "dumb");
}

TextStyle TextStyle::of_file(int descriptor) {
  if (!is_terminal(descriptor)) return {.width = 0, .color = false};
  winsize size{};
  const bool known = ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  const char* const no_color = std::getenv("NO_COLOR");
  return {.width = known ? size.ws_col : 80, .color = no_color == nullptr || *no_color == '\0'};
}

std::string colored(const std::string& text, Color color, const TextStyle& style) {
  if (!style.color || text.empty()) return text;
  return fmt::format("\x1b[{}m{}\x1b[0m", static_cast<int>(color), text);
}

std::string printable(std::string_view text) {
  std::string safe;
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    safe += code < 0x20 || code == 0x7f ? ' ' : letter;
  }
  // Control characters of the second kind are two bytes in UTF-8: 0xC2 0x80 to 0x9F.
  for (size_t at = 0; at + 1 < safe.size(); ++at) {
    const auto first = static_cast<unsigned char>(safe[at]);
    const auto second = static_cast<unsigned char>(safe[at + 1]);
    if (first == 0xC2 && second >= 0x80 && second < 0xA0) safe[at] = safe[at + 1] = ' ';
  }
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

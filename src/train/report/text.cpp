#include "train/report/text.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>

namespace lockstep::train {

double unix_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string with_commas(int64_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    const size_t left = digits.size() - i;
    if (i > 0 && left % 3 == 0 && digits[i - 1] != '-') text += ',';
    text += digits[i];
  }
  return text;
}

std::string counted(int64_t number, std::string_view what) {
  return with_commas(number) + " " + std::string(what) + (number == 1 ? "" : "s");
}

std::string short_time(double seconds) {
  // By what is left of it after rounding: 999.9 us are "1 ms".
  if (seconds >= 999.5) return long_time(seconds);
  if (seconds >= 0.9995) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 0.9995e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} us", seconds * 1e6);
}

std::string long_time(double seconds) {
  if (!(seconds < 1e12)) return "unknown time";
  const auto whole = static_cast<int64_t>(seconds);
  if (whole >= 86400) return fmt::format("{} d {} h", whole / 86400, whole % 86400 / 3600);
  if (whole >= 3600) return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
  if (whole >= 60) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return seconds >= 10 ? fmt::format("{} s", whole) : fmt::format("{:.1f} s", seconds);
}

std::string memory_text(double bytes) {
  return bytes >= 999.95e6 ? fmt::format("{:.1f} GB", bytes / 1e9)
                           : fmt::format("{:.1f} MB", bytes / 1e6);
}

std::string percent(double share) {
  return share != 0 && std::abs(share) < 0.095 ? fmt::format("{:.1f} %", 100 * share)
                                               : fmt::format("{:.0f} %", 100 * share);
}

std::string figure(double value) {
  if (std::isnan(value)) return "NaN";
  return fmt::format("{:.4g}", value);
}

std::string steady_figure(double value) {
  if (!std::isfinite(value)) return figure(value);
  std::string text = fmt::format("{:#.4g}", value);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

std::string metric_text(double value) {
  return std::isfinite(value) ? fmt::format("{:.4f}", value) : figure(value);
}

std::string rank_name(size_t rank, const std::string& host) {
  return host.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, host);
}

std::string kind_text(const std::string& kind) { return kind == "restart" ? "start" : kind; }

std::string plain_text(std::string_view text) {
  std::string plain;
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    plain += (code < 0x20 && letter != '\n') || code == 0x7f ? ' ' : letter;
  }
  for (size_t at = 0; at + 1 < plain.size(); ++at) {
    const auto byte = [&](size_t behind) {
      return at + behind < plain.size() ? static_cast<unsigned char>(plain[at + behind]) : 0;
    };
    const auto is_within = [&](size_t behind, int low, int high) {
      return byte(behind) >= low && byte(behind) <= high;
    };
    // U+0080 to U+009F; U+200E and F, U+202A to E; U+2066 to U+2069.
    if (byte(0) == 0xC2 && is_within(1, 0x80, 0x9F)) plain.replace(at, 2, "  ");
    const bool turns =
        (byte(1) == 0x80 && (is_within(2, 0x8E, 0x8F) || is_within(2, 0xAA, 0xAE))) ||
        (byte(1) == 0x81 && is_within(2, 0xA6, 0xA9));
    if (byte(0) == 0xE2 && turns) plain.replace(at, 3, "   ");
  }
  return plain;
}

std::string shortened(std::string_view text, size_t most) {
  if (text.size() <= most) return std::string(text);
  // Not within a letter.
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return std::string(text.substr(0, most)) + "…";
}

std::string escaped(std::string_view given) {
  const std::string text = plain_text(given);
  std::string safe;
  safe.reserve(text.size());
  for (const char letter : text) {
    switch (letter) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      case '\'':
        safe += "&#39;";
        break;
      default:
        safe += letter;
    }
  }
  return safe;
}

}  // namespace lockstep::train

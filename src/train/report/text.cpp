#include "train/report/text.h"

#include <fmt/format.h>

#include <cmath>

namespace lockstep::train {

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

std::string short_time(double seconds) {
  if (seconds >= 1) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
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
  constexpr double kMiB = 1 << 20;
  return bytes >= 1024 * kMiB ? fmt::format("{:.2f} GiB", bytes / (1024 * kMiB))
                              : fmt::format("{:.0f} MiB", bytes / kMiB);
}

std::string percent(double share) {
  return share != 0 && std::abs(share) < 0.095 ? fmt::format("{:.1f} %", 100 * share)
                                               : fmt::format("{:.0f} %", 100 * share);
}

std::string figure(double value) {
  if (std::isnan(value)) return "NaN";
  return fmt::format("{:.4g}", value);
}

std::string rank_name(size_t rank, const std::string& host) {
  return host.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, host);
}

std::string escaped(std::string_view text) {
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
        // Control characters are none of HTML's.
        safe += static_cast<unsigned char>(letter) < 0x20 && letter != '\n' ? ' ' : letter;
    }
  }
  return safe;
}

}  // namespace lockstep::train

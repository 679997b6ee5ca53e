#include "plan/words.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

namespace lockstep::plan {

// Units are chosen by what is left after rounding, or 999.9 KiB would be "1e+03 KiB".

std::string bytes_text(double bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = bytes / 1024;
  size_t unit = 0;
  while (unit + 1 < kUnits.size() && std::abs(value) >= 999.5) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.3g} {}", value, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds >= 999.5 * 86400) return fmt::format("{:.0f} days", seconds / 86400);
  if (seconds >= 86400) return fmt::format("{:.3g} days", seconds / 86400);
  if (seconds >= 7200) return fmt::format("{:.3g} h", seconds / 3600);
  if (seconds >= 120) return fmt::format("{:.3g} min", seconds / 60);
  if (seconds >= 0.9995) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 0.9995e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} us", seconds * 1e6);
}

std::string count_text(double count) {
  constexpr std::array kUnits = {"", " k", " M", " G", " T", " P", " E"};
  size_t unit = 0;
  while (unit + 1 < kUnits.size() && count >= 999.5) {
    count /= 1000;
    ++unit;
  }
  return fmt::format("{:.3g}{}", count, kUnits[unit]);
}

std::string percent_text(double share) { return fmt::format("{:.0f} %", 100 * share); }

std::string table_text(const std::vector<std::vector<std::string>>& rows, int width) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  size_t columns = 0, used = 0;
  while (columns < widths.size() &&
         (columns < 2 || width == 0 || used + widths[columns] + 2 <= static_cast<size_t>(width))) {
    used += widths[columns++] + 2;
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < std::min(columns, row.size()); ++i) {
      line += i == 0 ? fmt::format("{:<{}}", row[i], widths[i])
                     : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string wrapped(const std::string& text, int width) {
  const auto most = static_cast<size_t>(width == 0 ? 100 : std::max(20, width));
  std::istringstream words(text);
  std::string out, line;
  for (std::string word; words >> word;) {
    if (!line.empty() && line.size() + 1 + word.size() > most) {
      out += line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return out + line + "\n";
}

}  // namespace lockstep::plan

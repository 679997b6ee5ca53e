#include "core/process_stat.h"

#include <cinttypes>
#include <cstdio>
#include <fstream>

namespace lockstep {

std::optional<ProcessStat> process_stat(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');
  // "12 (name) S 1 12 ...": the name may hold ')', too. The start is field 22.
  const size_t name = text.find('('), name_end = text.rfind(')');
  if (name == std::string::npos || name_end == std::string::npos) return std::nullopt;
  ProcessStat stat{.pid = pid, .name = text.substr(name + 1, name_end - name - 1)};
  if (std::sscanf(text.c_str() + name_end,
                  ") %c %d %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                  "%*s %" SCNu64,
                  &stat.state, &stat.parent, &stat.group, &stat.start) != 4) {
    return std::nullopt;
  }
  return stat;
}

}  // namespace lockstep

#include "core/process/stat.h"

#include <algorithm>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

namespace lockstep {

bool ProcessStat::is_ending() const {
  constexpr uint32_t kExiting = 0x4;  // PF_EXITING
  constexpr uint32_t kKilled = 1u << (SIGKILL - 1);
  if (has_lost_main) return false;
  return state == 'Z' || state == 'X' || (flags & kExiting) != 0 || (pending & kKilled) != 0;
}

namespace {

// Of a process or a thread.
std::optional<ProcessStat> stat_in(const std::string& folder, pid_t pid) {
  std::ifstream file(folder + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');
  // "12 (name) S 1 12 ...": the name may hold ')', too. The flags are field 9, the start is 22,
  // the pending signals are 31.
  const size_t name = text.find('('), name_end = text.rfind(')');
  if (name == std::string::npos || name_end == std::string::npos) return std::nullopt;
  ProcessStat stat{.pid = pid, .name = text.substr(name + 1, name_end - name - 1)};
  if (std::sscanf(text.c_str() + name_end,
                  ") %c %d %d %*s %*s %*s %" SCNu32
                  " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64
                  " %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu32,
                  &stat.state, &stat.parent, &stat.group, &stat.flags, &stat.start,
                  &stat.pending) != 6) {
    return std::nullopt;
  }
  return stat;
}

}  // namespace

std::vector<ProcessStat> thread_stats(pid_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/task/";
  std::vector<ProcessStat> threads;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    auto thread = stat_in(folder, std::atoi(at->path().filename().c_str()));
    if (thread) threads.push_back(std::move(*thread));
  }
  std::ranges::sort(threads, {},
                    [pid](const ProcessStat& one) { return std::pair(one.pid != pid, one.pid); });
  return threads;
}

std::optional<ProcessStat> process_stat(pid_t pid) {
  auto stat = stat_in("/proc/", pid);
  if (stat && stat->state == 'Z') {
    stat->has_lost_main = std::ranges::any_of(
        thread_stats(pid), [](const ProcessStat& thread) { return !thread.is_ending(); });
  }
  return stat;
}

pid_t tracer_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  pid_t tracer = 0;
  for (std::string word; file >> word;) {
    if (word == "TracerPid:" && file >> tracer) break;
  }
  return tracer;
}

}  // namespace lockstep

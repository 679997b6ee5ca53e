#include "launch/descendants.h"

#include <dirent.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <string>

namespace lockstep::launch {

namespace {
pid_t left_out = 0;
}  // namespace

void leave_out(pid_t pid) { left_out = pid; }

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::vector<Process> descendants() {
  std::multimap<pid_t, Process> by_parent;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
  while (const dirent* entry = proc ? readdir(proc.get()) : nullptr) {
    if (!isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
    std::ifstream file("/proc/" + std::string(entry->d_name) + "/stat");
    std::string text;
    std::getline(file, text, '\0');
    // "12 (name) S 1 12 ...": the name is the program's choice and may hold anything, also ')'.
    const size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) continue;  // it ended meanwhile
    Process process;
    process.pid = static_cast<pid_t>(std::stol(text));
    if (process.pid == left_out) continue;
    pid_t parent = 0;
    if (std::sscanf(text.c_str() + name_end, ") %c %d %d", &process.state, &parent,
                    &process.group) == 3) {
      by_parent.emplace(parent, process);
    }
  }
  std::vector<Process> found{{getpid(), 0, 'R'}};
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [begin, end] = by_parent.equal_range(found[i].pid);
    for (auto child = begin; child != end; ++child) found.push_back(child->second);
  }
  found.erase(found.begin());
  return found;
}

char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');
  const size_t name_end = text.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= text.size() ? 'Z' : text[name_end + 2];
}

}  // namespace lockstep::launch

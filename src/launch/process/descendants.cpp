#include "launch/process/descendants.h"

#include <dirent.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace lockstep::launch {

namespace {

struct Entry {
  Process process;
  pid_t parent = 0;
  unsigned long long started = 0;  // with the pid it is one process's for ever
};

std::set<std::pair<pid_t, unsigned long long>> left_out;

std::optional<Entry> entry_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text;
  std::getline(file, text, '\0');
  // "12 (name) S 1 12 ...": the name is the program's choice and may hold anything, also ')'.
  const size_t name = text.find('('), name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;  // it ended meanwhile
  Entry entry;
  entry.process.pid = static_cast<pid_t>(std::stol(text));
  entry.process.name = text.substr(name + 1, name_end - name - 1);
  // The start is field 22; the state, behind the name, is the third.
  if (std::sscanf(text.c_str() + name_end,
                  ") %c %d %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                  &entry.process.state, &entry.parent, &entry.process.group, &entry.started) != 4) {
    return std::nullopt;
  }
  return entry;
}

}  // namespace

void leave_out(pid_t pid) {
  if (const auto entry = entry_of(std::to_string(pid))) left_out.emplace(pid, entry->started);
}

void leave_out_present() {
  for (const Process& process : descendants()) leave_out(process.pid);
}

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::vector<Process> descendants() {
  std::multimap<pid_t, Process> by_parent;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
  while (const dirent* one = proc ? readdir(proc.get()) : nullptr) {
    if (!isdigit(static_cast<unsigned char>(one->d_name[0]))) continue;
    auto entry = entry_of(one->d_name);
    if (!entry || left_out.contains({entry->process.pid, entry->started})) continue;
    by_parent.emplace(entry->parent, std::move(entry->process));
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

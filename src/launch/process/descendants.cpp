#include "launch/process/descendants.h"

#include <dirent.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <utility>

namespace lockstep::launch {

namespace {

std::set<std::pair<pid_t, uint64_t>> left_out;

}  // namespace

void leave_out(pid_t pid) {
  if (const auto stat = process_stat(pid)) left_out.emplace(pid, stat->start);
}

void leave_out_present() {
  for (const ProcessStat& process : descendants()) leave_out(process.pid);
}

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::vector<ProcessStat> descendants() {
  std::multimap<pid_t, ProcessStat> by_parent;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
  while (const dirent* one = proc ? readdir(proc.get()) : nullptr) {
    if (!isdigit(static_cast<unsigned char>(one->d_name[0]))) continue;
    auto stat = process_stat(static_cast<pid_t>(std::atoi(one->d_name)));
    if (!stat || left_out.contains({stat->pid, stat->start})) continue;
    by_parent.emplace(stat->parent, std::move(*stat));
  }
  std::vector<ProcessStat> found(1);
  found.front().pid = getpid();
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [begin, end] = by_parent.equal_range(found[i].pid);
    for (auto child = begin; child != end; ++child) found.push_back(child->second);
  }
  found.erase(found.begin());
  return found;
}

bool is_below(pid_t pid, pid_t ancestor) {
  auto stat = process_stat(pid);
  if (!stat || stat->is_ending()) return false;
  while (stat && stat->parent > 1 && stat->parent != ancestor) stat = process_stat(stat->parent);
  return stat && stat->parent == ancestor;
}

char process_state(pid_t pid) {
  const auto stat = process_stat(pid);
  if (!stat) return 'Z';
  return stat->has_lost_main ? kLostMain : stat->state;
}

}  // namespace lockstep::launch

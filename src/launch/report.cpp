#include "launch/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <string_view>

#include "launch/signals.h"
#include "lockstep/core/control.h"

namespace lockstep::launch {
namespace {

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

std::string_view hint(int wait_status) {
  if (WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL) {
    return "; if nobody sent that, the kernel was out of memory (dmesg)";
  }
  return "";
}

std::string story(const RankEnd& end) {
  std::string what = describe_exit(end.wait_status);
  if (what.starts_with("was ")) what.erase(0, 4);  // it follows a colon, for one rank or several
  switch (end.push) {
    case Push::None:
      return what;
    case Push::Asked:
      return what + " when the launcher asked for it";
    case Push::Killed:
      return "did not stop in time, killed by the launcher";
  }
  return what;
}

// "rank 3" or "ranks 0, 2-5, 7"
std::string names(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (size_t first = 0, last; first < ranks.size(); first = last + 1) {
    for (last = first; last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1;) ++last;
    parts.push_back(first == last ? std::to_string(ranks[first])
                                  : fmt::format("{}-{}", ranks[first], ranks[last]));
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(parts, ", "));
}

}  // namespace

std::vector<std::string> report(const Outcome& outcome) {
  std::vector<std::string> lines;
  std::map<std::string, std::vector<int>> others;
  for (const RankEnd& end : outcome.ends) {
    if (end.rank == outcome.cause) {
      lines.push_back(fmt::format("rank {} failed first: it {} after {:.2f} s (pid {}){}", end.rank,
                                  describe_exit(end.wait_status), seconds(end.ran), end.pid,
                                  hint(end.wait_status)));
    } else {
      others[story(end)].push_back(end.rank);
    }
  }
  if (!outcome.cause && outcome.outside) lines.push_back(*outcome.outside);
  if (outcome.signal) {
    lines.push_back(fmt::format("stopped by {}", signal_name(*outcome.signal)));
  }
  if (lines.empty()) return lines;
  for (auto& [what, ranks] : others) {
    std::sort(ranks.begin(), ranks.end());
    lines.push_back(fmt::format("  {}: {}", names(ranks), what));
  }
  return lines;
}

}  // namespace lockstep::launch

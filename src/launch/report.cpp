#include "launch/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <string_view>

#include "launch/signals.h"
#include "launch/stacks.h"
#include "lockstep/core/control.h"

namespace lockstep::launch {
namespace {

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
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

std::string_view hint(const RankEnd& cause) {
  if (!WIFSIGNALED(cause.wait_status)) {
    const int status = WEXITSTATUS(cause.wait_status);
    if (status == 127) return "a program or library that it needs was not found";
    return "";
  }
  switch (WTERMSIG(cause.wait_status)) {
    case SIGKILL:
      return "if nobody sent that, the kernel was out of memory (dmesg)";
    case SIGSEGV:
    case SIGABRT:
    case SIGFPE:
    case SIGILL:
      return "for the place: lockstep run ... gdb -batch -ex run -ex bt --args PROGRAM";
    case SIGBUS:
      return "a file that it had mapped was cut, or /dev/shm or the disk is full (lockstep doctor)";
    default:
      return "";
  }
}

const Seen* find(const std::vector<Seen>& ranks, int rank) {
  for (const Seen& seen : ranks) {
    if (seen.rank == rank) return &seen;
  }
  return nullptr;
}

// What the rank said when it failed, on one line.
std::string words_of(const Outcome& outcome, int rank) {
  const Seen* seen = find(outcome.seen, rank);
  if (seen == nullptr || !seen->log.failure) return "";
  std::string text = seen->log.failure->text;
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// The ranks in words of their own; equal ones share a line.
void add_grouped(std::vector<std::string>& lines, std::map<std::string, std::vector<int>>& groups) {
  std::vector<std::pair<int, std::string>> sorted;
  for (auto& [what, ranks] : groups) {
    std::sort(ranks.begin(), ranks.end());
    sorted.emplace_back(ranks.front(), fmt::format("  {}: {}", names(ranks), what));
  }
  std::sort(sorted.begin(), sorted.end());
  for (auto& [rank, line] : sorted) lines.push_back(std::move(line));
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

void add_stacks(std::vector<std::string>& lines, const Outcome& outcome) {
  std::vector<const flight::Stack*> stacks;
  for (const Seen& seen : outcome.seen) {
    if (const auto* stack = outcome.stack_of(seen)) stacks.push_back(stack);
  }
  if (stacks.empty()) return;
  const StackNames names(stacks);
  std::map<std::string, std::vector<int>> chains;
  for (const Seen& seen : outcome.seen) {
    const auto* stack = outcome.stack_of(seen);
    if (stack == nullptr) continue;
    const std::string signal =
        stack->signal == 0 ? "" : fmt::format("({}) ", signal_name(stack->signal));
    chains[signal + names.chain(*stack)].push_back(seen.rank);
  }
  lines.emplace_back("their stacks, innermost function first:");
  add_grouped(lines, chains);
}

}  // namespace

std::vector<std::string> report(const Outcome& outcome) {
  std::vector<std::string> lines;
  if (outcome.succeeded()) return lines;
  std::map<std::string, std::vector<int>> others, places;
  std::string advice;
  for (const RankEnd& end : outcome.ends) {
    const std::string words = words_of(outcome, end.rank);
    if (end.rank == outcome.cause) {
      lines.push_back(fmt::format("rank {} failed first: it {} after {:.2f} s (pid {})", end.rank,
                                  describe_exit(end.wait_status), seconds(end.ran), end.pid));
      if (!words.empty()) lines.push_back("  it said: " + words);
      advice = hint(end);
    } else {
      // An echo repeats the cause, so that only its beginning is of use.
      others[words.empty() ? story(end) : fmt::format("{}; it said: {}", story(end), words)]
          .push_back(end.rank);
    }
  }
  if (!outcome.cause && outcome.outside) lines.push_back(*outcome.outside);
  if (outcome.signal) {
    lines.push_back(fmt::format("stopped by {}", signal_name(*outcome.signal)));
  }
  add_grouped(lines, others);
  for (const Seen& seen : outcome.seen_first) {
    const std::string where = whereabouts(seen, outcome.failed_ns);
    if (!where.empty()) places[where].push_back(seen.rank);
    if (seen.state == 'T') advice = "a stopped process goes on with kill -CONT";
  }
  if (!places.empty()) {
    lines.emplace_back("where they were when the first failure was seen:");
    add_grouped(lines, places);
  }
  add_stacks(lines, outcome);
  if (!advice.empty()) lines.push_back("hint: " + advice);
  return lines;
}

}  // namespace lockstep::launch

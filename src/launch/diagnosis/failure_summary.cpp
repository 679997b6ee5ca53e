#include "launch/diagnosis/failure_summary.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <filesystem>
#include <map>
#include <system_error>

#include "core/control.h"
#include "launch/diagnosis/stacks.h"
#include "launch/process/signals.h"
#include "launch/rendezvous/network/message.h"
#include "lockstep/core/preemption.h"

namespace lockstep::launch {
namespace {

constexpr rlim_t kSmallStack = rlim_t{1} << 20;  // Linux gives 8 MiB

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

// Of this process, and of the ranks, which inherit it.
rlimit limit_of(__rlimit_resource what) {
  rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
  getrlimit(what, &limit);
  return limit;
}

bool is_cpu_time_limited() { return limit_of(RLIMIT_CPU).rlim_max != RLIM_INFINITY; }

// What may have been too little for a rank that died of this signal.
std::string limit_hint(int signal) {
  const rlim_t stack = limit_of(RLIMIT_STACK).rlim_cur, space = limit_of(RLIMIT_AS).rlim_cur;
  if (signal == SIGSEGV && stack < kSmallStack) {
    return fmt::format("its stack has {} KiB (`ulimit -s`), where libtorch needs more",
                       stack >> 10);
  }
  if (signal == SIGABRT && space != RLIM_INFINITY) {
    return fmt::format("its address space is limited to {} MiB (`ulimit -v`)", space >> 20);
  }
  return "";
}

// Libraries ask for it, and oneMKL's message is about another one.
bool has_no_working_directory() {
  std::error_code failed;
  return std::filesystem::current_path(failed).empty();
}

// `has_stack`: the report shows where it died.
std::string hint(const Outcome& outcome, const RankEnd& cause, bool has_stack) {
  if (!WIFSIGNALED(cause.wait_status)) {
    const int status = WEXITSTATUS(cause.wait_status);
    if (status != 127) {
      return has_no_working_directory()
                 ? "the working directory has been removed: start the job in another"
                 : "";
    }
    return outcome.could_not_map
               ? "a library did not fit into its address space (`ulimit -v`), or lies on a file "
                 "system that is mounted `noexec`"
               : "a program or library that it needs was not found";
  }
  switch (WTERMSIG(cause.wait_status)) {
    case SIGUSR1:
      if (!outcome.was_notified) return "";
      return fmt::format(
          "rank {} was killed by SIGUSR1, which was forwarded before it had a handler: create the "
          "PreemptionNotice first in main()",
          cause.rank);
    case SIGXCPU:
      return "it has used the processor time that ulimit -t allows";
    case SIGKILL:
      if (outcome.out_of_memory.value_or(0) == 0 && is_cpu_time_limited()) {
        return "somebody has sent that, or it has used the processor time that ulimit -t allows";
      }
      if (!outcome.out_of_memory) {
        return "if nobody sent SIGKILL, the kernel's OOM killer did (see dmesg)";
      }
      return *outcome.out_of_memory > 0 ? "the OOM killer has ended a process of this machine "
                                          "while the ranks ran (see dmesg)"
                                        : "the OOM killer has ended nothing while the ranks "
                                          "ran: another process sent SIGKILL";
    case SIGSEGV:
    case SIGABRT:
    case SIGFPE:
    case SIGILL:
      if (auto text = limit_hint(WTERMSIG(cause.wait_status)); !text.empty()) return text;
      if (has_stack) return "";
      return "to see where: lockstep run ... gdb -batch -ex run -ex bt --args PROGRAM";
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

// The rank's own failure message, on one line.
std::string words_of(const Outcome& outcome, const RankEnd& end) {
  const Seen* seen = find(outcome.seen, end.rank);
  std::string text = seen == nullptr || !seen->log.failure ? end.error : seen->log.failure->text;
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// The same without the rank's own number: "all_reduce #9 cannot go on", and "this rank calls" for
// "rank 3 calls". Ranks that report one consequence then have equal texts.
std::string without_own_rank(std::string words, int rank) {
  const std::string own = fmt::format("rank {}", rank), on = " on " + own;
  const auto ends_at = [&words](size_t at) {
    return at >= words.size() ||
           (!std::isdigit(static_cast<unsigned char>(words[at])) && words.substr(at, 2) != " (");
  };
  for (size_t at = 0; (at = words.find(own, at)) != std::string::npos;) {
    if (!ends_at(at + own.size())) {
      at += own.size();
    } else if (at >= 4 && words.compare(at - 4, on.size(), on) == 0) {
      words.erase(at - 4, on.size());
    } else {
      words.replace(at, own.size(), "this rank");
    }
  }
  return words;
}

// Ranks whose messages differ in the rank's number alone share a line.
class Echoes {
 public:
  void add(int rank, const std::string& story, const std::string& words) {
    Group& group = groups_[words.empty() ? story : story + without_own_rank(words, rank)];
    group.story = story;
    group.words = group.ranks.empty() ? words : without_own_rank(words, rank);
    group.ranks.push_back(rank);
  }
  void add_to(std::map<std::string, std::vector<int>>& lines) const {
    for (const auto& [key, group] : groups_) {
      const char* who = group.ranks.size() == 1 ? "it" : "each";
      lines[group.words.empty() ? group.story
                                : fmt::format("{}; {} said: {}", group.story, who, group.words)] =
          group.ranks;
    }
  }

 private:
  struct Group {
    std::string story, words;
    std::vector<int> ranks;
  };
  std::map<std::string, Group> groups_;
};

// Ranks whose places differ in their time alone share a line.
class Places {
 public:
  void add(int rank, const std::string& place) {
    // "..., for 0.31 s" or "..., 0.31 s before": the last number with two decimals.
    size_t end = place.rfind(" s");
    while (end != std::string::npos && end > 0 && !is_digit(place[end - 1])) {
      end = place.rfind(" s", end - 1);
    }
    if (end == std::string::npos || end == 0) {
      groups_[{place, ""}].ranks.push_back(rank);
      return;
    }
    size_t begin = end;
    while (begin > 0 && (is_digit(place[begin - 1]) || place[begin - 1] == '.')) --begin;
    Group& group = groups_[{place.substr(0, begin), place.substr(end)}];
    const double seconds = std::stod(place.substr(begin, end - begin));
    group.least = group.ranks.empty() ? seconds : std::min(group.least, seconds);
    group.most = group.ranks.empty() ? seconds : std::max(group.most, seconds);
    group.ranks.push_back(rank);
  }
  void add_to(std::map<std::string, std::vector<int>>& lines) const {
    for (const auto& [key, group] : groups_) {
      const std::string time = group.least == group.most
                                   ? fmt::format("{:.2f}", group.least)
                                   : fmt::format("{:.2f} to {:.2f}", group.least, group.most);
      lines[key.second.empty() ? key.first : key.first + time + key.second] = group.ranks;
    }
  }

 private:
  static bool is_digit(char one) { return one >= '0' && one <= '9'; }
  struct Group {
    double least = 0, most = 0;
    std::vector<int> ranks;
  };
  std::map<std::pair<std::string, std::string>, Group> groups_;
};

// What each rank said; equal messages share a line.
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
    case Push::Interrupted:
      return "killed at Ctrl-C, before the time to stop was over";
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

// "rank 1 exited with status 0 while others waited for it; ": where a collective failed on `cause`
// and says that.
std::string early_exits(const Outcome& outcome, int cause) {
  const Seen* seen = find(outcome.seen, cause);
  if (seen == nullptr || !seen->log.failure) return "";
  if (seen->log.failure->blame != flight::Blame::Peer) return "";
  const std::string& words = seen->log.failure->text;
  std::vector<int> early;
  for (const RankEnd& end : outcome.ends) {
    const bool is_named =
        words.find(fmt::format("rank {} exited", end.rank)) != words.npos ||
        words.find(fmt::format("(rank {} of the world) exited", end.rank)) != words.npos;
    if (is_success(end.wait_status) && is_named) early.push_back(end.rank);
  }
  if (early.empty()) return "";
  std::sort(early.begin(), early.end());
  return fmt::format("{} exited with status 0 while others waited for {}; ", names(early),
                     early.size() == 1 ? "it" : "them");
}

}  // namespace

std::string stopped_by(int signal) {
  return fmt::format("stopped by {}{}", signal_name(signal),
                     signal == SIGUSR1 ? ": the ranks are to be started again later" : "");
}

std::vector<std::string> report(const Outcome& outcome) {
  std::vector<std::string> lines;
  if (outcome.succeeded()) {
    if (!outcome.asks_for_requeue()) return lines;
    return {fmt::format("the ranks have ended with status {}: they ask to be started again later",
                        kRequeueStatus)};
  }
  Echoes echoes;
  Places places;
  std::string advice;
  for (const RankEnd& end : outcome.ends) {
    const std::string words = words_of(outcome, end);
    if (end.rank == outcome.cause) {
      lines.push_back(fmt::format("{}rank {} failed first: it {} after {:.2f} s (pid {})",
                                  early_exits(outcome, end.rank), end.rank,
                                  describe_exit(end.wait_status), seconds(end.ran), end.pid));
      if (!words.empty()) lines.push_back("  it said: " + words);
      const Seen* seen = find(outcome.seen, end.rank);
      advice = hint(outcome, end, seen != nullptr && outcome.stack_of(*seen) != nullptr);
    } else {
      echoes.add(end.rank, story(end), words);
    }
  }
  if (!outcome.cause && outcome.outside) lines.push_back(*outcome.outside);
  if (outcome.signal) {
    lines.push_back(stopped_by(*outcome.signal));
  }
  std::map<std::string, std::vector<int>> others, there;
  echoes.add_to(others);
  add_grouped(lines, others);
  for (const Seen& seen : outcome.seen_first) {
    const std::string where = whereabouts(seen, outcome.failed_ns);
    if (!where.empty()) places.add(seen.rank, where);
  }
  places.add_to(there);
  if (!there.empty()) {
    lines.emplace_back("where they were when the first failure was seen:");
    add_grouped(lines, there);
  }
  add_stacks(lines, outcome);
  if (!advice.empty()) lines.push_back("hint: " + advice);
  return lines;
}

}  // namespace lockstep::launch

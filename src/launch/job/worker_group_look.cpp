// How the worker group observes its ranks while they run, and reports on them.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "launch/diagnosis/failure_summary.h"
#include "launch/diagnosis/stacks.h"
#include "launch/diagnosis/threads.h"
#include "launch/job/late.h"
#include "launch/job/worker_group.h"

namespace lockstep::launch {
namespace {

using namespace std::chrono_literals;

constexpr auto kAnswer = 500ms;
// Between two checks for stopped ranks; one that is stopped in two of them is reported.
constexpr auto kLook = 1s;

// Any process is in an uninterruptible wait for moments, as when its program is read from the disk
// or it starts a child: only one that stays there for all of these looks is said to be.
constexpr int kLooksAtWait = 5;
constexpr auto kBetweenThem = 10ms;

}  // namespace

pid_t WorkerGroup::process_of(int local_rank, pid_t started) const {
  const pid_t own = flight_.process(local_rank);
  return own > 0 && own != started && is_below(own, started) ? own : started;
}

std::vector<Seen> WorkerGroup::look() const {
  std::vector<Seen> ranks;
  for (int local = 0; local < ranks_; ++local) {
    ranks.push_back({.rank = first_rank_ + local, .log = flight_.read(local), .state = 'Z'});
  }
  for (const auto& [pid, rank] : running_) {
    Seen& seen = ranks[static_cast<size_t>(rank.local_rank)];
    seen.pid = process_of(rank.local_rank, pid);
    seen.state = process_state(seen.pid);
  }
  const auto waits = [](const Seen& seen) { return seen.state == 'D'; };
  for (int i = 1; i < kLooksAtWait && std::ranges::any_of(ranks, waits); ++i) {
    std::this_thread::sleep_for(kBetweenThem);
    for (Seen& seen : ranks) {
      if (waits(seen)) seen.state = process_state(seen.pid);
    }
  }
  return ranks;
}

std::vector<Seen> WorkerGroup::ask(std::chrono::milliseconds limit) const {
  std::map<int, pid_t> pids;
  for (const auto& [pid, rank] : running_) pids[rank.local_rank] = process_of(rank.local_rank, pid);
  if (outside_ != nullptr) limit = std::min(limit, outside_->patience());
  ask_for_stacks(flight_, pids, limit);
  return look();
}

void WorkerGroup::say_where_ranks_are() {
  const uint64_t asked_ns = flight::now_ns();
  const std::vector<Seen> ranks = ask(kAnswer);
  for (const std::string& line : straggling_.lines(ranks)) output_.say(line);
  std::vector<const flight::Stack*> stacks;
  for (const Seen& seen : ranks) {
    if (seen.log.stack && seen.log.stack->at_ns >= asked_ns) stacks.push_back(&*seen.log.stack);
  }
  const StackNames names(stacks);
  for (const Seen& seen : ranks) {
    if (!seen.log.stack || seen.log.stack->at_ns < asked_ns) continue;
    output_.say(fmt::format("  rank {}: {}", seen.rank, names.chain(*seen.log.stack)));
  }
}

void WorkerGroup::say_of_leftovers(std::string_view what) {
  constexpr size_t kMost = 8;
  std::vector<std::string> names;
  size_t more = 0;
  for (const ProcessStat& process : descendants()) {
    if (process.state == 'Z' && !process.has_lost_main) continue;
    if (names.size() < kMost) {
      names.push_back(fmt::format("{} (pid {})", process.name, process.pid));
    } else {
      ++more;
    }
  }
  if (names.empty()) return;
  output_.say(fmt::format("{}: {}{}", what, fmt::join(names, ", "),
                          more == 0 ? "" : fmt::format(" and {} more", more)));
}

// Peers in a collective name a stopped rank at their deadline. When no rank is in one, as after the
// last, only the launcher can notice it.
void WorkerGroup::look_for_absent() {
  next_look_ = Clock::now() + kLook;
  for (auto& [started, rank] : running_) {
    const pid_t pid = process_of(rank.local_rank, started);
    const bool was_stopped = std::exchange(rank.is_stopped, process_state(pid) == 'T');
    if (!rank.is_stopped) rank.is_said = false;  // it has gone on
    if (!rank.is_stopped || !was_stopped || std::exchange(rank.is_said, true)) continue;
    output_.say(fmt::format("rank {} is stopped (state T, pid {}); kill -CONT {} resumes it",
                            first_rank_ + rank.local_rank, pid, pid));
    if (outside_ != nullptr) outside_->on_stopped(first_rank_ + rank.local_rank, pid);
  }
  if (outcome_.ends.empty() || said_missing_ ||
      flight::now_ns() < outcome_.ends.back().at_ns + late_after().count()) {
    return;
  }
  said_missing_ = true;
  const uint64_t now = flight::now_ns();
  std::vector<std::string> missing;
  for (const Seen& seen : look()) {
    if (seen.state == 'Z' || missing.size() == 8) continue;
    const std::string where = whereabouts(seen, now);
    const std::string threads = waits_of_threads(seen.pid);
    missing.push_back(fmt::format(
        "rank {} ({}){}", seen.rank, where.empty() ? "in no collective" : where,
        threads.empty() ? "" : fmt::format(", pid {}, its threads: {}", seen.pid, threads)));
  }
  output_.say(fmt::format(
      "{} of {} ranks of this host have exited with status 0; still running after {} s: {} (kill "
      "-USR2 {} shows their stacks)",
      outcome_.ends.size(), ranks_,
      std::chrono::duration_cast<std::chrono::seconds>(late_after()).count(),
      fmt::join(missing, "; "), getpid()));
}

}  // namespace lockstep::launch

#include "launch/job/outcome.h"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <tuple>
#include <utility>

#include "lockstep/core/preemption.h"

namespace lockstep::launch {

bool is_success(int wait_status) { return WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0; }

bool is_requeue(int wait_status) {
  return WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == kRequeueStatus;
}

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

int exit_code_of_signal(int signal) { return signal == SIGUSR1 ? kRequeueStatus : 128 + signal; }

namespace {

bool was_killed_by(int signal, const RankEnd& end) {
  return WIFSIGNALED(end.wait_status) && WTERMSIG(end.wait_status) == signal &&
         end.push == Push::None;
}

std::optional<flight::Failure> said_by(const Outcome& outcome, int rank) {
  for (const Seen& seen : outcome.seen) {
    if (seen.rank == rank) return seen.log.failure;
  }
  return std::nullopt;
}

}  // namespace

std::optional<int> first_failure(const Outcome& outcome) {
  using Order = std::tuple<bool, uint64_t>;  // an echo?, when
  std::optional<std::pair<Order, int>> first;
  for (const RankEnd& end : outcome.ends) {
    const auto said = said_by(outcome, end.rank);
    // What it did after the launcher had asked it to stop is not a failure of its own.
    const bool is_fine = is_success(end.wait_status) || is_requeue(end.wait_status);
    const bool by_itself = end.push == Push::None && !is_fine;
    const bool said_own = said && said->blame == flight::Blame::Own && !is_fine;
    if (!by_itself && !said_own) continue;
    const bool killed = WIFSIGNALED(end.wait_status) && end.push == Push::None && !said_own;
    const Order order = killed || !said ? Order{false, end.at_ns}
                                        : Order{said->blame == flight::Blame::Peer, said->at_ns};
    if (!first || order < first->first) first = {order, end.rank};
  }
  if (!first) return std::nullopt;
  return first->second;
}

std::set<std::pair<int, int>> own_failures(const Outcome& outcome) {
  std::set<std::pair<int, int>> failures;
  for (const RankEnd& end : outcome.ends) {
    const bool is_cause = end.rank == outcome.cause;
    if (was_killed_by(SIGKILL, end)) {
      if (is_cause) return {};
      continue;
    }
    const bool is_fine = is_success(end.wait_status) || is_requeue(end.wait_status);
    const auto said = said_by(outcome, end.rank);
    const bool is_own = said ? said->blame == flight::Blame::Own : end.push == Push::None;
    if (is_cause || (is_own && !is_fine)) failures.emplace(end.rank, end.wait_status);
  }
  return failures;
}

const flight::Stack* Outcome::stack_of(const Seen& rank) const {
  const auto& stack = rank.log.stack;
  if (!stack) return nullptr;
  if (stack->signal != 0) return &*stack;
  // An older stack was requested by the user.
  if (failed_ns == 0 || stack->at_ns < failed_ns) return nullptr;
  const auto& said = rank.log.failure;
  const bool left = std::any_of(ends.begin(), ends.end(), [&](const RankEnd& end) {
    return end.rank == rank.rank && end.push == Push::None;
  });
  return left && said && said->at_ns <= stack->at_ns ? nullptr : &*stack;
}

bool Outcome::asks_for_requeue() const {
  const auto asks = [](const RankEnd& end) { return is_requeue(end.wait_status); };
  return !cause && std::any_of(ends.begin(), ends.end(), asks) &&
         std::all_of(ends.begin(), ends.end(),
                     [&](const RankEnd& end) { return asks(end) || is_success(end.wait_status); });
}

bool Outcome::was_killed_by_notice() const {
  return was_notified && std::any_of(ends.begin(), ends.end(), [this](const RankEnd& end) {
           return end.rank == cause && was_killed_by(SIGUSR1, end);
         });
}

int Outcome::exit_code() const {
  for (const RankEnd& end : ends) {
    if (end.rank != cause) continue;
    // A rank that failed, and was stopped before it had ended, has no status of its own.
    return end.push == Push::None ? exit_code_of(end.wait_status) : 1;
  }
  if (asks_for_requeue()) return kRequeueStatus;
  if (signal) return exit_code_of_signal(*signal);
  return outside ? 1 : 0;
}

}  // namespace lockstep::launch

#include "c10d/queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/time_limit.h"

namespace lockstep::c10d_backend {
namespace {

// Callbacks within callbacks whose operations are ordered among themselves. It bounds what an
// endless chain of them needs.
constexpr size_t kDeepest = 16;

bool begins_with(const Place& place, const Place& first) {
  return place.size() >= first.size() && std::equal(first.begin(), first.end(), place.begin());
}

}  // namespace

void Queue::add(Job job) {
  see_callbacks();
  job.after = places_;
  if (jobs_.empty()) looked_ = Clock::now();
  deadline_ = std::min(deadline_, job.deadline);
  const Place& scope = job.work->scope().place;
  auto at = jobs_.end();
  if (!scope.empty()) {
    at = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& other) {
      return !begins_with(other.work->scope().place, scope) && is_held(other);
    });
  }
  jobs_.insert(at, std::move(job));
}

std::optional<Job> Queue::next() {
  if (jobs_.empty() || is_held(jobs_.front())) return std::nullopt;
  return pop();
}

std::optional<Job> Queue::pop() {
  if (jobs_.empty()) return std::nullopt;
  Job job = std::move(jobs_.front());
  jobs_.pop_front();
  return job;
}

void Queue::expect_callbacks(BackendWork& work) {
  if (work.place().empty() && !work.is_message()) expected_[work.getSequencenumber()] = &work;
}

void Queue::see_callbacks() {
  for (auto next = expected_.begin(); next != expected_.end();) {
    BackendWork& work = *(next++)->second;  // give_place() takes it out
    if (work.has_callbacks()) give_place(work);
  }
}

void Queue::give_place(BackendWork& work) {
  if (!work.place().empty()) return;
  expected_.erase(work.getSequencenumber());
  Place place = work.scope().place;
  if (place.size() < kDeepest) place.push_back(++places_);
  if (!work.is_message()) awaited_.emplace(place, &work);
  work.set_place(std::move(place));
}

// One without a place comes after all that have one.
bool Queue::may_call(const BackendWork& work) const {
  if (work.is_message() || awaited_.empty()) return true;
  return !work.place().empty() && work.place() <= awaited_.begin()->first;
}

void Queue::forget(const BackendWork& work) {
  expected_.erase(work.getSequencenumber());
  auto [at, end] = awaited_.equal_range(work.place());
  while (at != end && at->second != &work) ++at;
  if (at != end) awaited_.erase(at);
  see_callbacks();  // those of what its own have started come before the next one's
}

void Queue::let_through(const BackendWork& work) {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(),
                                  [&](const Job& one) { return one.work.get() == &work; });
  if (found == jobs_.end()) return;
  for (auto job = jobs_.begin(); job <= found; ++job) job->after = 0;
}

void Queue::let_all_through() {
  for (Job& job : jobs_) job.after = 0;
}

// One that comes before it in its scope, of which callbacks, or those of what they have started,
// have not returned. In the map, the first place beyond the scope itself is of the earliest one.
Queue::Awaited::const_iterator Queue::holder_of(const Job& job) const {
  const Place& scope = job.work->scope().place;
  const auto first = awaited_.upper_bound(scope);
  const bool holds = first != awaited_.end() && begins_with(first->first, scope) &&
                     first->first[scope.size()] <= job.after;
  return holds ? first : awaited_.end();
}

std::optional<std::string> Queue::overdue(Clock::time_point now) {
  if (jobs_.empty()) return std::nullopt;
  const auto stopped = standstill(now - std::exchange(looked_, now), kLook);
  for (Job& job : jobs_) job.deadline += stopped;
  deadline_ += stopped;
  if (now < deadline_) return std::nullopt;
  const auto first = std::min_element(
      jobs_.begin(), jobs_.end(),
      [](const Job& one, const Job& other) { return one.deadline < other.deadline; });
  deadline_ = first->deadline;
  if (now < deadline_) return std::nullopt;
  auto holder = holder_of(*first);
  if (holder == awaited_.end()) holder = holder_of(jobs_.front());
  if (holder == awaited_.end()) return std::nullopt;
  return fmt::format(
      "operation {} of the group ({}) was held back for {} ms by the callbacks of operation {} "
      "({}), which have not returned{}",
      first->work->getSequencenumber(), ::c10d::opTypeToString(first->work->retrieveOpType()),
      first->work->getTimeout().count(), holder->second->getSequencenumber(),
      ::c10d::opTypeToString(holder->second->retrieveOpType()),
      holder->second->is_settled() ? "" : ": that operation is not over");
}

}  // namespace lockstep::c10d_backend

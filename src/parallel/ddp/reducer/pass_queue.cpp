#include "parallel/ddp/reducer/pass_queue.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "comm/transport.h"
#include "parallel/ddp/reducer/backward_pass.h"
#include "parallel/ddp/reducer/reducer.h"

namespace lockstep::parallel {
namespace {

// Of the backward() that ends on this thread. What was queued for its end owns them, since another
// thread may be the one that drops that.
thread_local std::weak_ptr<std::vector<std::shared_ptr<PassQueue>>> ending;

// Of all groups, which may be in use by one thread each. Never destroyed: a Ddp may be static.
struct Hooks {
  std::mutex mutex;
  std::map<const CommHook*, const Reducer*> users;
};

Hooks& hooks() {
  static auto& all = *new Hooks;
  return all;
}

}  // namespace

std::shared_ptr<PassQueue> PassQueue::of(const Group& group) {
  static std::mutex mutex;
  static std::map<const comm::Transport*, std::weak_ptr<PassQueue>> queues;
  const std::lock_guard lock(mutex);
  std::erase_if(queues, [](const auto& item) { return item.second.expired(); });
  auto& known = queues[&group.transport()];
  auto queue = known.lock();
  if (!queue) known = queue = std::make_shared<PassQueue>();
  return queue;
}

void PassQueue::add(Reducer& reducer) {
  static std::atomic<int64_t> count = 0;
  members_.push_back({.reducer = &reducer, .number = ++count});
  if (!reducer.hook()) return;
  const std::lock_guard lock(hooks().mutex);
  hooks().users.emplace(reducer.hook().get(), &reducer);
}

bool PassQueue::is_of_another(const CommHook& hook, const Reducer* reducer) {
  const std::lock_guard lock(hooks().mutex);
  const auto found = hooks().users.find(&hook);
  return found != hooks().users.end() && found->second != reducer;
}

void PassQueue::join(const Reducer& reducer, const JoinPlace& place) {
  member(reducer).in_join = place;
}

void PassQueue::remove(const Reducer& reducer) {
  abandon(reducer);
  std::erase_if(members_, [&](const Member& member) { return member.reducer == &reducer; });
  const std::lock_guard lock(hooks().mutex);
  std::erase_if(hooks().users, [&](const auto& user) { return user.second == &reducer; });
}

void PassQueue::abandon(const Reducer& reducer) { std::erase(open_, &reducer); }

bool PassQueue::comes_before(const Reducer& one, const Reducer& other) {
  if (one.is_joined() && other.is_joined())
    return member(one).in_join.number < member(other).in_join.number;
  if (one.has_passed() != other.has_passed()) return one.has_passed();
  const bool is_known = !one.has_passed() || (member(one).has_met && member(other).has_met);
  return is_known && one.caller() > other.caller();
}

void PassQueue::begin(Reducer& reducer) {
  const auto next = std::ranges::find_if(
      open_, [&](const Reducer* other) { return comes_before(reducer, *other); });
  open_.insert(next, &reducer);
}

bool PassQueue::waits_for_end(const Reducer& reducer) {
  return reducer.is_joined() && !member(reducer).in_join.is_first;
}

bool PassQueue::may_launch(const Reducer& reducer) {
  if (!reducer.has_passed() || waits_for_end(reducer)) return false;
  // One that has not begun may still do so, if it ever did beside another.
  return std::ranges::none_of(members_, [&](const Member& other) {
    return std::ranges::find(open_, other.reducer) == open_.end() &&
           comes_before(*other.reducer, reducer);
  });
}

void PassQueue::launch(Reducer& reducer) {
  if (members_.size() == 1 && !waits_for_end(reducer)) return reducer.launch_due();
  for (Reducer* each : open_) {
    if (!may_launch(*each)) return;
    each->launch_due();
    if (!each->has_only_last() || each->is_joined()) return;
  }
}

void PassQueue::end(const std::shared_ptr<PassQueue>& queue) {
  if (const auto all = ending.lock()) {
    if (std::ranges::find(*all, queue) == all->end()) all->push_back(queue);
    return;
  }
  const auto all = std::make_shared<Queues>(1, queue);
  ending = all;
  at_end_of_backward(
      [all] {
        ending.reset();
        const auto queues = std::exchange(*all, {});
        try {
          finish(queues);
        } catch (...) {
          abandon(queues);
          throw;
        }
      },
      [all] { abandon(std::exchange(*all, {})); });
}

void PassQueue::finish(Queues queues) {
  std::ranges::sort(queues, std::greater(), [](const auto& queue) { return queue->latest(); });
  std::vector<std::pair<PassQueue*, Reducer*>> joined;
  for (const auto& queue : queues) {
    for (Reducer* each : queue->open_) {
      queue->member(*each).has_met |= queue->open_.size() > 1;
      if (each->is_joined()) joined.emplace_back(queue.get(), each);
    }
  }
  std::ranges::sort(joined, {},
                    [](const auto& one) { return one.first->member(*one.second).in_join.number; });
  for (const auto& [queue, each] : joined) {
    each->launch_all_but_last();
    queue->finish(*each);
  }
  for (const auto& queue : queues) {
    for (Reducer* each : queue->open_) each->launch_all_but_last();
  }
  for (const auto& queue : queues) {
    while (!queue->open_.empty()) queue->finish(*queue->open_.front());
  }
}

void PassQueue::finish(Reducer& reducer) {
  std::erase(open_, &reducer);
  try {
    reducer.finish_pass();
  } catch (...) {
    reducer.abandon();
    throw;
  }
}

void PassQueue::abandon(const Queues& queues) {
  for (const auto& queue : queues) {
    while (!queue->open_.empty()) queue->open_.front()->abandon();
  }
}

int64_t PassQueue::latest() {
  int64_t latest = 0;
  for (const Reducer* each : open_) latest = std::max(latest, member(*each).number);
  return latest;
}

}  // namespace lockstep::parallel

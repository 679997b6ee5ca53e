#include "comm/unfinished.h"

#include <fmt/format.h>

#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

bool overlap(const Memory& a, const Memory& b) {
  if (!overlap(a.whole, b.whole)) return false;
  const auto parts = [](const Memory& memory) {
    return memory.parts.empty() ? std::vector<Span>{memory.whole} : memory.parts;
  };
  for (const Span& one : parts(a)) {
    for (const Span& other : parts(b)) {
      if (overlap(one, other)) return true;
    }
  }
  return false;
}

bool conflict(const Uses& a, const Uses& b) {
  return a.unknown || b.unknown || overlap(a.writes, b.writes) || overlap(a.writes, b.reads) ||
         overlap(a.reads, b.writes);
}

}  // namespace

const std::shared_ptr<Unfinished>& Unfinished::shared_by_this_thread() {
  // Destructors of older thread_local and of static objects may call after it was destroyed: then a
  // new one is made and never freed. A child by fork() has its own.
  thread_local std::shared_ptr<Unfinished>* own = nullptr;
  if (own == nullptr || !(*own)->is_here()) {
    own = new std::shared_ptr<Unfinished>(std::make_shared<Unfinished>(OwnProcess()));
    struct AtEnd {
      ~AtEnd() { delete std::exchange(own, nullptr); }
    };
    thread_local const AtEnd end;
    static_cast<void>(end);
  }
  return *own;
}

void Unfinished::refuse_child(std::string_view what) const {
  throw ConfigError(fmt::format(
      "[comm] {}: {}; let the parent make the call, or the child join a group of its own "
      "(join_group) or exec() a program",
      what, refusal()));
}

void Unfinished::keep(std::shared_ptr<Pending> dropped) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    dropped_.push_back(dropped);
    any_.store(true, std::memory_order_release);
  } catch (const std::bad_alloc&) {
    // Then it is not finished.
  }
}

std::shared_ptr<Pending> Unfinished::take_first(const Uses* conflicting) {
  const std::lock_guard lock(mutex_);
  auto first = dropped_.end();
  for (auto at = dropped_.begin(); at != dropped_.end(); ++at) {
    if (conflicting != nullptr && !conflict((*at)->uses_, *conflicting)) continue;
    if (first == dropped_.end() || (*at)->number_ < (*first)->number_) first = at;
  }
  if (first == dropped_.end()) return nullptr;
  std::shared_ptr<Pending> pending = std::move(*first);
  dropped_.erase(first);
  any_.store(!dropped_.empty(), std::memory_order_release);
  return pending;
}

void Unfinished::finish_before(const Uses& uses) {
  if (!is_here() || !any_.load(std::memory_order_acquire)) return;
  // A nested wait finishes no others: they may need this rank's call.
  const bool outer = std::exchange(finishing_, true);
  try {
    while (const auto pending = take_first(&uses)) pending->wait();
  } catch (...) {
    finishing_ = outer;
    throw;
  }
  finishing_ = outer;
}

void Unfinished::finish_all() {
  if (!is_here() || finishing_ || !any_.load(std::memory_order_acquire)) return;
  finishing_ = true;
  try {
    while (const auto pending = take_first(nullptr)) pending->wait();
  } catch (...) {
    finishing_ = false;
    throw;
  }
  finishing_ = false;
}

bool Unfinished::poll() {
  if (!is_here() || finishing_ || polling_ || !any_.load(std::memory_order_acquire)) return true;
  std::vector<std::shared_ptr<Pending>> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped = dropped_;
  }
  bool all = true;
  polling_ = true;  // the parts of a dropped list of operations belong to the group, too
  for (const auto& pending : dropped) {
    if (!pending->uses_.unknown) all = pending->poll_alone() && all;
  }
  polling_ = false;
  return all;
}

void Unfinished::close() noexcept {
  std::vector<std::shared_ptr<Pending>> dropped;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  dropped.swap(dropped_);
}

}  // namespace lockstep::comm

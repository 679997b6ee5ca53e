#include "lockstep/comm/work.h"

#include <algorithm>
#include <utility>

#include "comm/unfinished.h"
#include "core/flight/record.h"
#include "core/time_limit.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

class Chain : public Pending {
 public:
  Chain(Work first, std::function<Work()> next)
      : first_(std::move(first)), next_(std::move(next)) {}
  bool runs_in_wait() const override { return true; }

 private:
  void finish() override {
    first_.wait();
    begin_second();
    second_.wait();
  }
  bool finish_within(std::chrono::microseconds limit) override {
    const auto until = std::chrono::steady_clock::now() + limit;
    if (!first_.wait_for(limit)) return false;
    begin_second();
    const auto left =
        std::chrono::ceil<std::chrono::microseconds>(until - std::chrono::steady_clock::now());
    return second_.wait_for(std::max(left, std::chrono::microseconds(0)));
  }
  void begin_second() {
    if (next_) second_ = std::exchange(next_, nullptr)();
  }
  // Drives the first; wait() has the rest to do in any case.
  bool advance() override {
    (void)first_.is_completed();
    return false;
  }

  Work first_, second_;
  std::function<Work()> next_;
};

}  // namespace

// `finish` returns whether the operation is over.
template <class Finish>
bool Pending::end(const Finish& finish) {
  if (!over_) {
    if (group_) group_->check_process("wait");
    flight::Span blocked(flight::Activity::Communication, call_);
    try {
      over_ = finish();
      const uint64_t now = flight::now_ns();
      if (over_) flight::end(call_, now);
      blocked.end(now);
    } catch (...) {
      set_failed();
    }
  }
  if (error_) std::rethrow_exception(error_);
  // Also where it was over before, so that ranks that wait in the same order finish what was
  // dropped at the same place. Not inside a transport, whose own parts belong to no group.
  if (over_ && group_) {
    group_->finish_all();
    Unfinished::of_this_thread().finish_all();
  }
  return over_;
}

void Pending::wait() {
  end([this] {
    finish();
    return true;
  });
}

bool Pending::wait_within(std::chrono::microseconds limit) {
  return end([&] { return finish_within(bounded(limit)); });
}

bool Pending::poll() { return poll_alone() && (error_ || !group_ || group_->poll()); }

bool Pending::poll_alone() {
  if (over_ || (group_ && !group_->is_here())) return true;
  try {
    return advance();
  } catch (...) {
    set_failed();
    return true;
  }
}

// In a handler.
void Pending::set_failed() {
  error_ = std::current_exception();
  over_ = true;
  try {
    throw;
  } catch (const CommError& error) {
    flight::report_failure(error.what(), flight::Blame::Peer);
  } catch (...) {
    // The program's own.
  }
}

void Pending::belong_to(std::shared_ptr<Unfinished> group, Uses uses) {
  group_ = std::move(group);
  number_ = group_->next_number();
  uses_ = std::move(uses);
}

void Work::drop() noexcept {
  const std::shared_ptr<Pending> pending = std::move(pending_);
  if (!pending->group_) return;
  if (!pending->group_->is_here()) {
    new std::shared_ptr<Pending>(pending);  // what it holds is the parent's
  } else if (!pending->over_) {
    pending->group_->keep(pending);
  }
}

void wait_all(std::span<Work> works) {
  for (Work& work : works) work.wait();
}

size_t wait_any(std::span<Work> works) {
  if (works.empty()) throw ConfigError("[comm] wait_any: no operations to wait for");
  for (const Work& work : works) {
    if (!work.pending() || !work.pending()->runs_in_wait()) continue;
    throw ConfigError(
        "[comm] wait_any: what then() begins has to come in the same order on every rank: wait() "
        "for it");
  }
  // Each turn drives the group of another one.
  constexpr std::chrono::microseconds kFirst{20}, kLongest{2000};
  std::chrono::microseconds limit = kFirst;
  for (size_t turn = 0;; ++turn, limit = std::min(2 * limit, kLongest)) {
    for (size_t i = 0; i < works.size(); ++i) {
      if (!works[i].is_completed()) continue;
      works[i].wait();
      return i;
    }
    const size_t i = turn % works.size();
    if (works[i].wait_for(limit)) return i;
  }
}

Work then(Work first, std::function<Work()> next) {
  const std::shared_ptr<Unfinished> group = first.pending() ? first.pending()->group() : nullptr;
  auto chain = std::make_shared<Chain>(std::move(first), std::move(next));
  chain->belong_to(group ? group : Unfinished::shared_by_this_thread(), {.unknown = true});
  return Work(std::move(chain));
}

void Work::set_call(uint32_t call) const {
  if (pending_) {
    pending_->set_call(call);
  } else {
    flight::end(call);
  }
}

}  // namespace lockstep::comm

// How a launcher leaves its job.
#include <utility>

#include "launch/rendezvous/node/node.h"

namespace lockstep::launch {

void Node::interrupt(const Failure& failure, Time now) {
  if (phase_ == Phase::Ending || phase_ == Phase::Over) return;
  if (is_root()) {
    coordinator_->interrupt(failure, now);
    broadcast(now);
  } else if (failure.is_kill() || (failure.is_notice() && ranks_ && !halted_ && !failure_)) {
    if (phase_ == Phase::Member) report(Failed{attempt_, failure}, now);
  } else if (seated_ && phase_ == Phase::Member) {
    interrupted_ = failure;
    rank_failed(failure, now);
  } else {
    end(failure.status, failure.what, now);
  }
}

void Node::end(int status, const std::string& why, Time now) {
  if (phase_ == Phase::Ending || phase_ == Phase::Over) return;
  phase_ = Phase::Ending;
  status_ = status;
  why_ = why;
  // The longest that ranks may take, and then a lease for the other launchers.
  end_by_ = now + options_.timing.stop_after_signal + options_.timing.lease;
  if (ranks_ && !std::exchange(halted_, true)) actions_.emplace_back(Halt{why, 0});
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    if (caller->second.id != 0) {
      ++caller;
      continue;
    }
    hang_up(caller->first);
    caller = callers_.erase(caller);
  }
  leave_if_alone();
}

// The coordinator leaves last: it has to tell the others why the job ends.
void Node::leave_if_alone() {
  if (phase_ != Phase::Ending || ranks_ || !callers_.empty()) return;
  phase_ = Phase::Over;
  disconnect();
  actions_.emplace_back(Leave{status_, why_});
}

}  // namespace lockstep::launch

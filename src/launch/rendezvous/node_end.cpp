// How a launcher leaves its job.
#include <utility>

#include "launch/rendezvous/node.h"

namespace lockstep::launch {

void Node::interrupt(const Failure& failure, Time now) {
  if (phase_ == Phase::Ending || phase_ == Phase::Over) return;
  if (is_root()) {
    coordinator_->interrupt(failure, now);
    broadcast(now);
  } else if (seated_ && phase_ == Phase::Member) {
    interrupted_ = failure;
    rank_failed(failure, now);
  } else {
    // Launchers below this one know of no end, and must not rely on this one any more.
    while (!children_.empty()) drop_child(children_.begin()->first, false, now);
    end(failure.status, failure.what, now);
  }
}

void Node::end(int status, const std::string& why, Time now) {
  if (phase_ == Phase::Ending || phase_ == Phase::Over) return;
  phase_ = Phase::Ending;
  status_ = status;
  why_ = why;
  // The longest that ranks may take, and then as long for each launcher below to be noticed.
  end_by_ = now + options_.timing.stop_after_signal + options_.timing.lease;
  if (ranks_ && !std::exchange(halted_, true)) actions_.emplace_back(Halt{why, 0});
  for (auto child = children_.begin(); child != children_.end();) {
    if (child->second.id != 0) {
      ++child;
      continue;
    }
    hang_up(child->first);
    child = children_.erase(child);
  }
  leave_if_alone();
}

// Children first: they have to be told why the job ends.
void Node::leave_if_alone() {
  if (phase_ != Phase::Ending || ranks_ || !children_.empty()) return;
  phase_ = Phase::Over;
  if (parent_) hang_up(*std::exchange(parent_, std::nullopt));
  actions_.emplace_back(Leave{status_, why_});
}

}  // namespace lockstep::launch

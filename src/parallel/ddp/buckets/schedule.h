// Which of a pass's gradients are complete, and which bucket is the next to be averaged.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/ddp/buckets/buckets.h"

namespace lockstep::parallel {

// A bucket is due when its gradients are complete and all buckets before it were taken, so that the
// ranks' collectives come in one order, even if their gradients arrive in different ones. The last
// bucket carries the flags of all parameters and is never due: it waits for the end of backward(),
// so that its average tells every rank that all ranks have finished their backward pass.
class BucketSchedule {
 public:
  enum class Step : uint8_t {
    Absent,
    Arriving,  // about to be added to the parameter's gradient
    Placed,    // already where it belongs, which is another place
    Complete,
  };

  explicit BucketSchedule(size_t parameters) : steps_(parameters) {}
  void begin(const Assignment& assignment) {
    std::ranges::fill(steps_, Step::Absent);
    order_.clear();
    waiting_.clear();
    for (const auto& members : assignment) waiting_.push_back(members.size());
    next_ = 0;
  }

  Step step(size_t parameter) const { return steps_[parameter]; }
  bool is_complete(size_t parameter) const { return steps_[parameter] == Step::Complete; }
  void set(size_t parameter, Step step) { steps_[parameter] = step; }
  // `bucket`: the parameter's, if it is in one.
  void complete(size_t parameter, std::optional<size_t> bucket) {
    steps_[parameter] = Step::Complete;
    order_.push_back(parameter);
    if (bucket) --waiting_[*bucket];
  }

  bool all_complete() const { return order_.size() == steps_.size(); }
  // The order in which parameters became complete.
  const std::vector<size_t>& order() const { return order_; }

  bool is_due() const { return next_ + 1 < waiting_.size() && waiting_[next_] == 0; }
  bool has_only_last() const { return next_ + 1 >= waiting_.size(); }
  bool has_next() const { return next_ < waiting_.size(); }
  // Takes the next bucket.
  size_t take() { return next_++; }

 private:
  std::vector<Step> steps_;  // by parameter
  std::vector<size_t> order_;
  std::vector<size_t> waiting_;  // by bucket: gradients that are not complete
  size_t next_ = 0;
};

}  // namespace lockstep::parallel

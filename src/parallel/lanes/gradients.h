// The gradients of a rank's lanes, added up as they arrive.
#pragma once

#include <memory>
#include <vector>

#include "parallel/ddp/buckets/buckets.h"
#include "parallel/lanes/plan.h"

namespace lockstep::parallel {

// Slot 0 of the plan is the reducer's own buckets, where the average is to be; the other slots are
// buckets of this rank alone, with the same layout. A gradient to which the next lane's is added
// needs no slot: its tensor is kept until then, or a copy where something else refers to it.
class LaneGradients {
 public:
  LaneGradients(std::shared_ptr<const LanePlan> plan, size_t parameters, size_t dense);

  const LanePlan& plan() const { return *plan_; }
  // After the reducer's buckets were made.
  void make_slots(const std::vector<Named>& dense, const Assignment& assignment, size_t flags);

  // The own lane whose backward() is the next to count.
  int64_t next() const { return next_; }
  // Whether all lanes of the step that began last are.
  bool is_complete() const { return complete_; }

  // The first lane begins: gradients from before the step are part of every lane's.
  void begin(const std::vector<Named>& parameters);
  // Discards what has been added.
  void reset();
  // A backward() of a lane begins; the lane is complete.
  void begin_lane() { in_lane_.assign(in_lane_.size(), false); }
  void end_lane();
  void skip_to(int64_t own_lane) { next_ = own_lane; }

  // The lane's gradient of a parameter, or that it has none; one of the two for each parameter.
  void place(const Buckets& first, size_t parameter, const at::Tensor& gradient);
  void place_nothing(const Buckets& first, size_t parameter);
  void place_sparse(size_t parameter, const at::Tensor& gradient);

  // Whether any of this rank's lanes, or all, reached the parameter.
  const std::vector<char>& any_reached() const { return any_; }
  const std::vector<char>& all_reached() const { return all_; }
  // By own lane; undefined where a lane had none.
  const std::vector<at::Tensor>& sparse(size_t parameter) const {
    return sparse_[parameter - dense_];
  }
  // What the gradient was before the step, if it was defined.
  const at::Tensor& prior(size_t parameter) const { return priors_[parameter]; }

  // Starts the average over all lanes of a bucket, into the reducer's own.
  comm::Work average(const Buckets& first, size_t bucket, const comm::CallOptions& options) const;

 private:
  void reached(size_t parameter);
  void put(const Buckets& first, size_t parameter, const at::Tensor& value);
  bool waits(int64_t own_lane) const;

  std::shared_ptr<const LanePlan> plan_;
  size_t dense_;
  int slots_ = 1;
  std::vector<Buckets> more_;  // slots 1 and up
  int64_t next_ = 0;
  bool complete_ = true;
  std::vector<char> any_, all_, in_lane_;
  std::vector<std::vector<at::Tensor>> sparse_;
  std::vector<at::Tensor> priors_, waiting_;
};

}  // namespace lockstep::parallel

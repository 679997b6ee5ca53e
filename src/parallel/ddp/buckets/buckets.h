// The memory gradients live in: flat tensors, each reduced by one collective.
#pragma once

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/comm_hook.h"
#include "lockstep/parallel/ddp.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {

// Indices of parameters, by bucket.
using Assignment = std::vector<std::vector<size_t>>;

// Fills buckets of one dtype each with the parameters in the given order. A dtype's i-th bucket is
// closed when it reaches limits[i], the last limit holding for all further ones. Buckets come in
// the order of their last parameters, which is that in which they become ready.
Assignment assign_buckets(const std::vector<Named>& parameters, const std::vector<size_t>& order,
                          const std::vector<int64_t>& limits);

class Buckets {
 public:
  // Every rank calls it with the same assignment, of all `parameters`. All memory is zero. After
  // the last bucket's gradients there are `flags` more elements. Without parameters there is one
  // empty bucket, so that there are flags.
  Buckets(const Group& group, const std::vector<Named>& parameters, Assignment assignment,
          size_t flags);

  size_t size() const { return flats_.size(); }
  const Assignment& assignment() const { return assignment_; }
  size_t bucket_of(size_t parameter) const { return bucket_of_[parameter]; }

  // What is communicated, flags included; complex gradients as pairs of real numbers.
  const at::Tensor& flat(size_t bucket) const { return flats_[bucket]; }
  // The same without the flags, as hooks see it.
  const Bucket& bucket(size_t index) const { return buckets_[index]; }
  // A parameter's part of it, with the parameter's sizes and (if its memory has no gaps or
  // overlaps) strides.
  const at::Tensor& view(size_t parameter) const { return views_[parameter]; }
  const at::Tensor& flags() const { return flags_; }

  // Makes the parameter's gradient the view, copying it in if it was another tensor. It must be
  // defined and dense.
  void adopt(const at::Tensor& parameter, size_t index) const;
  // Before gradients are written: what else lies in the buckets gets memory of its own. That is
  // what lies elsewhere than in its parameter's view, gradients of the `others` (tensors that no
  // bucket has), and gradients that a program still refers to after they were
  // cleared (kept = p.grad(); zero_grad()): in one process these would keep their values.
  void make_room(const std::vector<Named>& parameters, const std::vector<at::Tensor>& others);
  // The last of these for one parameter, whose gradient is undefined.
  void make_room(size_t index);
  // Whether the gradient's memory is the view.
  bool holds(const at::Tensor& gradient, size_t index) const;

 private:
  Assignment assignment_;
  std::vector<size_t> bucket_of_;
  std::vector<at::Tensor> flats_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> views_;  // only their parameters refer to them, as gradients
  at::Tensor flags_;
};

}  // namespace lockstep::parallel

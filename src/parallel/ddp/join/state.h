// Join, as one Ddp sees it: which ranks have batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/join.h"
#include "parallel/ddp/buckets/usage_flags.h"
#include "parallel/ddp/join/gate.h"

namespace lockstep::parallel {

// Between begin() and leave() a pass finds out from its flags which ranks have gradients of their
// own for it; otherwise all have.
class JoinState {
 public:
  JoinState(const Group& group, size_t parameters);

  // `gate` may be null.
  void begin(const JoinOptions& options, std::shared_ptr<JoinGate> gate);
  // Returns the ranks that were in the last backward() that any was in.
  std::vector<int> leave();

  bool is_joined() const { return options_.has_value(); }
  bool divides_by_present() const { return options_ && options_->divisor == Divisor::Active; }

  // The flags of a pass, once they have come. False when no rank has gradients for it.
  bool read(const UsageFlags& flags);
  // Ranks that had gradients of their own in the last pass that any had.
  const std::vector<int>& present() const { return present_; }
  int64_t count_present() const { return static_cast<int64_t>(present_.size()); }
  bool all_present() const { return count_present() == group_.size(); }
  // Some rank was in the last backward(), and all were.
  bool any_in_backward() const { return somebody_; }
  bool all_in_backward() const { return static_cast<int>(in_backward_.size()) == group_.size(); }

  // A gradient that is not zeroed between two backward() of a step is part of what this rank
  // contributes to the second. With Divisor::World an absent rank contributes nothing in its place,
  // so each rank keeps what the gradient was when the first of the pass was to be added to it; and
  // what it is where none was, since an absent rank has none of an earlier step.
  void note_prior(size_t parameter, const at::Tensor& gradient);
  const at::Tensor& prior(size_t parameter) const { return priors_[parameter]; }
  bool has_prior() const;
  void forget_priors();

  // Of a rank that was in the pass.
  void refuse_uneven(int64_t pass) const;
  // A backward() comes, under hold() or not: a rank may be without a batch for the next forward.
  void end_forward();

 private:
  Group group_;
  std::optional<JoinOptions> options_;
  std::shared_ptr<JoinGate> gate_;
  std::vector<int> present_;
  std::vector<int> in_backward_;  // in the last pass in which any was
  bool somebody_ = false;
  std::vector<at::Tensor> priors_;  // by parameter
};

}  // namespace lockstep::parallel

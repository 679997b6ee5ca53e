// What ranks count in a net's buffer, in one process with libtorch alone.
#pragma once

#include <algorithm>

#include "random/changes/net.h"

namespace lockstep::test::changes {

class PlainSeen {
 public:
  // The phase's ranks take over what those before had; `first`: what the buffer begins with.
  PlainSeen(const Course& course, size_t phase, const at::Tensor& first, const PlainSeen* before);

  // A forward of a rank, or of the next lane of a step.
  void forward(int rank, const at::Tensor& x);
  // `present`: ranks with a batch. `is_quiet`: ranks do not communicate.
  void end_pass(const std::vector<int>& present, bool is_quiet);
  // What each rank has becomes what is saved.
  void end_phase();
  // As when a Ddp attaches itself again.
  void become_rank_zeros() { std::ranges::fill(own_, at::Tensor(own_[0])); }

  const at::Tensor& first() const { return own_[0]; }
  const at::Tensor& of_ranks() const { return of_ranks_; }

 private:
  // All ranks have the first of these, or their average.
  void share(const std::vector<at::Tensor>& own);

  const Course& course_;
  const Phase& phase_;
  std::vector<at::Tensor> own_;    // by rank
  std::vector<at::Tensor> lanes_;  // of the step
  std::vector<int> present_;       // in the last step
  at::Tensor of_ranks_;            // at the phase's end
};

}  // namespace lockstep::test::changes

#include "random/changes/plain_seen.h"

#include <torch/types.h>

#include <algorithm>

namespace lockstep::test::changes {

PlainSeen::PlainSeen(const Course& course, size_t phase, const at::Tensor& first,
                     const PlainSeen* before)
    : course_(course), phase_(course.phases[phase]) {
  for (size_t rank = 0; rank < phase_.ranks.size(); ++rank) {
    own_.push_back(before == nullptr ? first.clone() : before->own_[rank % before->own_.size()]);
  }
}

void PlainSeen::forward(int rank, const at::Tensor& x) {
  // Each lane begins with what the step began with.
  if (course_.lanes > 0) return lanes_.push_back(seen_after(own_[0], x));
  at::Tensor& seen = own_[static_cast<size_t>(rank)];
  seen = seen_after(seen, x);
}

void PlainSeen::end_pass(const std::vector<int>& present, bool is_quiet) {
  present_ = present;
  if (course_.lanes > 0) return share(std::exchange(lanes_, {}));
  if (is_quiet || own_.size() == 1 || course_.buffers == Shared::None) return;
  std::vector<at::Tensor> all;
  for (const int rank : present) all.push_back(own_[static_cast<size_t>(rank)]);
  share(all);
}

void PlainSeen::end_phase() {
  if (!phase_.joined.empty()) {
    // Ranks without a batch take over what another has.
    for (size_t rank = 0; rank < own_.size(); ++rank) {
      const bool is_present = std::ranges::count(present_, static_cast<int>(rank)) > 0;
      if (!is_present) own_[rank] = own_[static_cast<size_t>(present_[0])];
    }
  }
  of_ranks_ = at::cat(own_);
  if (phase_.kind == Kind::Local && course_.buffers != Shared::None) become_rank_zeros();
}

void PlainSeen::share(const std::vector<at::Tensor>& own) {
  const at::Tensor shared =
      course_.buffers == Shared::Average ? at::stack(own).mean(0) : at::Tensor(own[0]);
  std::ranges::fill(own_, shared);
}

}  // namespace lockstep::test::changes

// The same training in one process, with libtorch alone: none of the library's arithmetic.
#pragma once

#include "random/changes/net.h"

namespace lockstep::test::changes {

// What a training has after phase `last`, under the names that Training::state() gives.
Named in_plain_torch(const Course& course, size_t last);

// What a rank's dropout draws from in a phase: ranks that were in the phase before go on.
uint64_t generator_seed(const Course& course, size_t phase, int rank);

// What a communication hook makes of ranks' gradients.
class PlainHook {
 public:
  PlainHook(Hook kind, bool feedback) : kind_(kind), feedback_(feedback) {}

  // The phase's ranks take over what those before had, by names of `parameters`.
  void begin(int ranks, const PlainHook* before, const Named& parameters);
  // As when a Ddp attaches itself again: of what it does not know nothing is kept.
  void keep_attached(const Named& parameters);
  // Averages of what each rank has, of each parameter.
  Named average(const Named& parameters, const std::vector<std::vector<at::Tensor>>& gradients);
  void rescale(double factor);

 private:
  struct Kept {
    at::Tensor parameter;
    std::vector<at::Tensor> errors;  // by rank
    at::Tensor q;
  };
  at::Tensor cast(const std::vector<at::Tensor>& sums, std::vector<at::Tensor>& errors) const;
  at::Tensor largest(const std::vector<at::Tensor>& sums, std::vector<at::Tensor>& errors) const;
  at::Tensor approximate(const std::string& name, const std::vector<at::Tensor>& gradients,
                         Kept& kept) const;

  Hook kind_;
  bool feedback_;
  int ranks_ = 1;
  int64_t passes_ = 0;
  std::vector<std::pair<std::string, Kept>> kept_;
};

}  // namespace lockstep::test::changes

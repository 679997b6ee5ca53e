// Flags appended to the last bucket: which parameters some rank reached, which ranks took part, and
// which buffers some rank changed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/parallel/ddp.h"

namespace lockstep::parallel {

// One element per parameter, then one per rank, then one per buffer. For Unused::Zero a parameter's
// flag is set where it was reached, for Error where it was not. What matters after the reduction is
// only whether the sum or average is above 0, which no rounding of a narrow dtype can change.
class Flags {
 public:
  Flags() = default;
  struct Counts {
    size_t parameters = 0, ranks = 0, buffers = 0;
    size_t all() const { return parameters + ranks + buffers; }
  };
  // `elements` are of any real dtype, as many as counted; collectives combine them in place.
  Flags(at::Tensor elements, const Counts& counts, Unused meaning)
      : elements_(std::move(elements)), counts_(counts), meaning_(meaning) {}

  const at::Tensor& elements() const { return elements_; }

  // Before the reduction. All parameters were reached, which is nearly always so:
  void write_all_reached();
  void write(const std::vector<char>& reached);
  // This rank takes no part: it reaches nothing and lacks nothing.
  void write_absent();
  // Only when present() will be asked.
  void write_presence(int rank);
  void write_changed(const std::vector<char>& changed);

  // After it.
  bool any_set() const;
  std::vector<char> set() const;        // by parameter
  std::vector<int> present() const;     // ranks
  std::vector<double> changed() const;  // by buffer: the sum or average over ranks

 private:
  at::Tensor of_parameters() const { return part(0, counts_.parameters); }
  at::Tensor of_ranks() const { return part(counts_.parameters, counts_.ranks); }
  at::Tensor of_buffers() const {
    return part(counts_.parameters + counts_.ranks, counts_.buffers);
  }
  at::Tensor part(size_t begin, size_t count) const;
  float reached() const { return meaning_ == Unused::Zero ? 1.0F : 0.0F; }

  at::Tensor elements_;
  Counts counts_;
  Unused meaning_ = Unused::Zero;
};

}  // namespace lockstep::parallel

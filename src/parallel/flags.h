// News that ride with the last bucket: which parameters some rank reached, and which ranks took
// part.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/parallel/ddp.h"

namespace lockstep::parallel {

// One element per parameter, then one per rank. For Unused::Zero a parameter's flag is set where it
// was reached, for Error where it was not. What matters after the reduction is only whether the sum
// or average is above 0, which no rounding of a narrow dtype can change.
class Flags {
 public:
  Flags() = default;
  // `elements` are of any real dtype, parameters + ranks of them; collectives combine them in
  // place.
  Flags(at::Tensor elements, size_t parameters, Unused meaning)
      : elements_(std::move(elements)), parameters_(parameters), meaning_(meaning) {}

  const at::Tensor& elements() const { return elements_; }

  // Before the reduction. All parameters were reached, which is nearly always so:
  void write_all_reached();
  void write(const std::vector<char>& reached);
  // This rank takes no part: it reaches nothing and lacks nothing.
  void write_absent();
  // Only when present() will be asked.
  void write_presence(int rank);

  // After it.
  bool any_set() const;
  std::vector<char> set() const;     // by parameter
  std::vector<int> present() const;  // ranks

 private:
  int64_t parameter_count() const { return static_cast<int64_t>(parameters_); }
  float reached() const { return meaning_ == Unused::Zero ? 1.0F : 0.0F; }
  std::vector<double> read() const;

  at::Tensor elements_;
  size_t parameters_ = 0;
  Unused meaning_ = Unused::Zero;
};

}  // namespace lockstep::parallel

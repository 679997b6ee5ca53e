// The arithmetic of what a thread runs.
#pragma once

#include <ATen/record_function.h>

namespace lockstep::plan {

// Counts the matrix products, convolutions and attention of this thread while it lives; one at a
// time in a thread.
class [[nodiscard]] FlopCounter {
 public:
  FlopCounter();
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  // Floating-point operations so far: a multiplication and an addition are two.
  double count() const;

 private:
  at::CallbackHandle handle_;
};

}  // namespace lockstep::plan

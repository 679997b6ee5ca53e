// What a pass keeps, and what it needs beside that at its busiest moment.
#pragma once

#include <cstdint>

#include "lockstep/plan/model_profile.h"

namespace lockstep::plan {

struct ActivationPeak {
  double kept = 0;     // bytes when forward has ended
  double working = 0;  // bytes beside them at the busiest moment of backward
  // Beside both at the busiest moment, where gradients have no memory before backward computes
  // them.
  double growing_gradients = 0;
};

// Backward goes from the last unit to the first, and each frees what it kept.
ActivationPeak activation_peak(const ModelProfile& model, int64_t samples, Recomputed recomputed);

}  // namespace lockstep::plan

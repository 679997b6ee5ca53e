// Numbers as people read them.
#pragma once

#include <string>

#include "lockstep/train/callback.h"
#include "train/report/text.h"

namespace lockstep::train {

// "0.8 MB", "3.2 GB", of 10^6 and 10^9 bytes
std::string megabytes(double bytes);

// Time of a training in which it took steps: without evaluating and saving.
inline double busy_seconds(const RunState& state) {
  return state.seconds - state.evaluation_seconds - state.saving_seconds;
}

}  // namespace lockstep::train

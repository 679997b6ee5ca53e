#pragma once

#include "lockstep/train/callback.h"

namespace lockstep::train {

// Time of a training in which it took steps: without evaluating and saving.
inline double busy_seconds(const RunState& state) {
  return state.seconds - state.evaluation_seconds - state.saving_seconds;
}

}  // namespace lockstep::train

// The error of checkpoints.
#pragma once

#include "lockstep/core/error.h"

namespace lockstep {

// A checkpoint could not be saved, or is damaged, missing, or belongs to other objects. Those that
// were saved before are unchanged.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep

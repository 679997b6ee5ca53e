// Random numbers that belong to a sample, not to the thread, rank or batch that makes it.
#pragma once

#include <cstdint>

#include "lockstep/core/compiler.h"

namespace lockstep::data {

// For a Dataset that draws random numbers for its samples itself, inside get_batch(): from this
// call on, what this thread draws from libtorch's default generators is a function of
// (LoaderOptions::seed, epoch, index), until it is called for another sample or get_batch()
// returns. Without this call it is a function of the index of the batch's first sample. Does
// nothing when no Loader is calling.
void draw_for_sample(int64_t index);

}  // namespace lockstep::data

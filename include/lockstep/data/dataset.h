// Samples by number, many at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/core/compiler.h"

namespace lockstep::data {

// Samples stacked along dimension 0: n x ... of data, n x ... of target.
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

// A Loader may call the const members from a thread of its own, while others do the same.
class Dataset {
 public:
  virtual ~Dataset() = default;

  // How many samples there are. Does not change.
  virtual int64_t size() const = 0;

  // Samples indices[0], indices[1], ... in that order; an index may come twice. Throws DataError
  // that names the index when one is outside [0, size()) or cannot be read.
  virtual Batch get_batch(at::IntArrayRef indices) const = 0;

  // As get_batch(), where `spare` is an earlier batch of this data set that may no longer be in
  // use: an implementation overwrites those of its tensors that have no other reference, instead of
  // allocating.
  virtual Batch refill(Batch /*spare*/, at::IntArrayRef indices) const {
    return get_batch(indices);
  }
};

}  // namespace lockstep::data

// A data set that is two tensors in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/data/dataset.h"

namespace lockstep::data {

// Sample i is (data[i], target[i]). A batch is one gather of rows, of the tensors' own dtype and on
// their device. Keeps the tensors themselves, without a copy when they are contiguous.
class TensorDataset : public Dataset {
 public:
  // Throws ConfigError unless both have at least one dimension and the same size of the first.
  TensorDataset(at::Tensor data, at::Tensor target);

  int64_t size() const override { return data_.size(0); }
  Batch get_batch(at::IntArrayRef indices) const override { return refill({}, indices); }
  Batch refill(Batch spare, at::IntArrayRef indices) const override;

  // The two tensors.
  const at::Tensor& data() const { return data_; }
  const at::Tensor& target() const { return target_; }

 private:
  at::Tensor data_;
  at::Tensor target_;
};

}  // namespace lockstep::data

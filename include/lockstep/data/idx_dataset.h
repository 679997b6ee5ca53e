// Images or other bytes in IDX files, with labels: EMNIST, KMNIST, and what has MNIST's form.
#pragma once

#include <filesystem>

#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {

// Batches: data float32 n x ..., bytes divided by 255; target int64 n. (Mnist keeps bytes, a
// quarter of the memory, and normalises.)
class IdxDataset : public TensorDataset {
 public:
  // Files as read_idx() takes them, packed by gzip or not; labels have one dimension. Throws
  // DataError as it does, and for different numbers of samples and labels, or none.
  IdxDataset(const std::filesystem::path& data, const std::filesystem::path& labels);
};

}  // namespace lockstep::data

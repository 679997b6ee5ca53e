// Named tensors in a file as a data set.
#pragma once

#include <string>
#include <vector>

#include "lockstep/data/tensor_dataset.h"

namespace lockstep::checkpoint {

// Which tensors of a file are what. Several are columns: each n, or n x ..., laid side by side as
// float32 (targets too).
struct TensorFileOptions {
  std::vector<std::string> data = {"inputs"};
  std::vector<std::string> targets = {"targets"};
};

// Samples along the first dimension of tensors in a safetensors file, or any other file that
// open_tensors() opens (lockstep/checkpoint/tensor_files.h): a Hugging Face folder, a file of
// torch.save. Of their dtypes; integer targets become int64.
class TensorFileDataset : public data::TensorDataset {
 public:
  // Reads those tensors alone. Throws CheckpointError when the file cannot be read, and DataError
  // that lists the names there are for one that is not there, and for tensors without samples, or
  // with different numbers of them.
  explicit TensorFileDataset(const std::string& path, const TensorFileOptions& options = {});
};

}  // namespace lockstep::checkpoint

namespace lockstep {
using checkpoint::TensorFileDataset;
}  // namespace lockstep

// NumPy's arrays in files (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {

// The array of a .npy file of version 1, 2 or 3, as numpy.save writes it, in memory of its own:
// row-major and in this machine's byte order, also where the file has another. Dtypes: bool, int8
// to int64, float16 to float64, complex64 and complex128 as they are; uint8 too, uint16 becomes
// int32, uint32 and uint64 int64. Throws DataError that names the file for anything else (objects,
// texts, structures, long doubles, numbers beyond int64), and for a file that is truncated, too
// long, or no .npy file, as .npz archives. Reads no more than the file has, even if its header says
// otherwise.
at::Tensor read_npy(const std::filesystem::path& file);

// Samples along the first dimension of two arrays: data of any dtype but complex, converted to
// float32 unless it is floating; targets as they are, integers as int64. Throws as read_npy() does,
// and for arrays of different lengths.
class NpyDataset : public TensorDataset {
 public:
  // Two files.
  NpyDataset(const std::filesystem::path& data, const std::filesystem::path& target);
};

}  // namespace lockstep::data

namespace lockstep {
using data::NpyDataset;
using data::read_npy;
}  // namespace lockstep

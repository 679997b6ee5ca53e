// Numbers of one floating-point type as another, without torch.
#pragma once

#include <cstring>
#include <string_view>

#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {

// The number that lies there, at any address.
template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Whether it is F64, F32, F16 or BF16.
bool is_convertible(std::string_view dtype);

// Rounded to the nearest, of two to the even one, by way of float32, as at::Tensor::to(). Both are
// convertible. Throws CheckpointError for a finite number that would become infinite.
TensorBytes converted(std::string_view bytes, std::string_view from, const Dtype& to);

}  // namespace lockstep::checkpoint

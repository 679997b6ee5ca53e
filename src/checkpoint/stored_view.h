// Tensors of files, before they are copied, and what they are copied to.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {

// A view of the bytes of a stored tensor, which have to outlive it. Where a file stores complex
// numbers as two reals each, it is a view of the reals.
at::Tensor view_of(std::string_view bytes, const StoredTensor& stored);

// "F32 [4, 3]", for errors.
std::string type_text(const std::string& dtype, at::IntArrayRef sizes);

// Why copying to `target` would not give it the values, for errors; empty when it would.
std::string obstacle_to_writing(const at::Tensor& target);

}  // namespace lockstep::checkpoint

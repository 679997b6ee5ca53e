// Tensors without memory: their values, for those that keep them elsewhere, and their storages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace lockstep::parallel {

// A deferred tensor's values in memory of their own, of its sizes and strides; the tensor stays as
// it is. Another tensor is returned itself.
at::Tensor values_of(const at::Tensor& tensor);

// Undoes release_data_and_set_meta_custom_data_ptr_error_msg_(), which libtorch itself can since
// 2.15 only.
void allow_access(c10::StorageImpl& storage);

}  // namespace lockstep::parallel

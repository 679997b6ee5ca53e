#include "parallel/fsdp/parameter_memory.h"

#include <ATen/ATen.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <utility>

#include "parallel/nn/deferred_init.h"

namespace lockstep::parallel {

ParameterMemory::ParameterMemory(const at::Tensor& parameter, at::ScalarType dtype,
                                 std::string message)
    : parameter_(parameter), message_(std::move(message)) {
  const auto bytes = parameter.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  storage_ = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                   at::DataPtr(nullptr, parameter.device()),
                                                   /*allocator=*/nullptr, /*resizable=*/false);
  // set_() would access memory that does not exist, and not all devices support it.
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  at::Tensor data =
      at::detail::make_tensor<c10::TensorImpl>(at::Storage(storage_), parameter.key_set(), type);
  data.unsafeGetTensorImpl()->set_sizes_and_strides(parameter.sizes(), parameter.strides());
  parameter_.set_data(data);
  hide(Memory::Freed);
}

void ParameterMemory::show(const at::Tensor& flat, int64_t begin) {
  auto* memory = static_cast<char*>(flat.mutable_data_ptr()) + begin * flat.element_size();
  if (place_ != memory) {
    place_ = memory;
    storage_->set_data_ptr_noswap(at::DataPtr(
        memory, new at::Tensor(flat), [](void* owner) { delete static_cast<at::Tensor*>(owner); },
        flat.device()));
  }
  if (!shown_) allow_access(*storage_);
  shown_ = true;
}

void ParameterMemory::hide(Memory memory) {
  if (memory == Memory::Freed) {
    place_ = nullptr;
    storage_->set_data_ptr_noswap(at::DataPtr(nullptr, parameter_.device()));
  }
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(message_);
  shown_ = false;
}

void ParameterMemory::abandon(std::string message) {
  message_ = std::move(message);
  hide(Memory::Freed);
}

bool ParameterMemory::is_attached() const {
  return parameter_.storage().unsafeGetStorageImpl() == storage_.get();
}

bool has_memory(const at::Tensor& tensor) {
  try {
    tensor.storage().data();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace lockstep::parallel

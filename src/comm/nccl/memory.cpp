#include "comm/nccl/memory.h"

#include <ATen/ATen.h>

#include "comm/device/memory.h"

namespace lockstep::comm {
namespace {

// Below that NCCL's own copy costs less than a call; ncclMemAlloc gives whole pages of 2 MiB.
constexpr int64_t kWorthIt = 512 << 10;

// Of NCCL's own making, which is what it accesses best; null when it cannot be had.
void* allocate(const nccl::Api& api, size_t bytes) {
  void* memory = nullptr;
  if (api.MemAlloc == nullptr || api.MemFree == nullptr) return nullptr;
  return api.MemAlloc(&memory, bytes) == nccl::Success ? memory : nullptr;
}

}  // namespace

at::Tensor registered_memory(const std::shared_ptr<NcclComm>& comm, at::IntArrayRef sizes,
                             const at::TensorOptions& options) {
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  const nccl::Api& api = comm->api();
  if (bytes < kWorthIt || api.CommRegister == nullptr) return at::zeros(sizes, options);
  if (void* memory = allocate(api, bytes)) {
    void* handle = comm->enlist(memory, bytes);
    return tensor_over(memory, sizes, options,
                       [comm, handle](void* gone) {
                         comm->dismiss(handle);
                         comm->api().MemFree(gone);
                       })
        .zero_();
  }
  const at::Tensor plain = at::zeros(sizes, options);
  void* handle = comm->enlist(plain.data_ptr(), bytes);
  return tensor_over(plain.data_ptr(), sizes, options,
                     [comm, handle, plain](void*) { comm->dismiss(handle); });
}

}  // namespace lockstep::comm

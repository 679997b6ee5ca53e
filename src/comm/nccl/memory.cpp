#include "comm/nccl/memory.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/process/own_process.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// Below that NCCL's own copy costs less than a call; ncclMemAlloc gives whole pages of 2 MiB.
constexpr int64_t kWorthIt = 512 << 10;

at::Tensor tensor_over(void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
                       std::function<void(void*)> free) {
  return at::for_blob(memory, sizes)
      .deleter(std::move(free))
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

// Of NCCL's own making, which is what it accesses best; null when it cannot be had.
void* allocate(const nccl::Api& api, size_t bytes) {
  void* memory = nullptr;
  if (api.MemAlloc == nullptr || api.MemFree == nullptr) return nullptr;
  return api.MemAlloc(&memory, bytes) == nccl::Success ? memory : nullptr;
}

}  // namespace

at::Tensor registered_memory(const std::shared_ptr<NcclComm>& comm,
                             const std::shared_ptr<DeviceState>& state, at::IntArrayRef sizes,
                             const at::TensorOptions& options) {
  const int64_t bytes =
      c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  const nccl::Api& api = comm->api();
  if (bytes < kWorthIt || api.CommRegister == nullptr) return at::zeros(sizes, options);
  if (void* memory = allocate(api, bytes)) {
    void* handle = comm->enlist(memory, bytes);
    at::Tensor tensor = tensor_over(
        memory, sizes, options, [comm, state, handle, process = OwnProcess()](void* own) {
          if (!process.is_here()) return;
          // Kernels may still use it, and no allocator orders its reuse after them.
          const c10::impl::VirtualGuardImpl device(state->device().type());
          device.synchronizeDevice(state->device().index());
          comm->dismiss(handle);
          comm->api().MemFree(own);
        });
    return tensor.zero_();
  }
  const at::Tensor plain = at::zeros(sizes, options);
  void* handle = comm->enlist(plain.data_ptr(), bytes);
  return tensor_over(plain.data_ptr(), sizes, options,
                     [comm, state, handle, plain, process = OwnProcess()](void*) {
                       if (process.is_here()) comm->dismiss(handle);
                     });
}

}  // namespace lockstep::comm

#include "comm/device/cuda.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "comm/host/libraries.h"

namespace lockstep::comm {
namespace {

constexpr const char* kDriver = "libcuda.so.1";
constexpr const char* kPart = "libtorch_cuda.so";

// As many as CUDA_VISIBLE_DEVICES leaves.
CudaDevices ask_driver() {
  void* driver = dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return {0, fmt::format("no NVIDIA driver ({})", dlerror())};
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count_devices = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  if (init == nullptr || count_devices == nullptr)
    return {0, fmt::format("{} is not an NVIDIA driver", kDriver)};
  if (const int status = init(0); status != 0) {
    return {0, fmt::format("the NVIDIA driver does not start (cuInit: error {})", status)};
  }
  int count = 0;
  if (const int status = count_devices(&count); status != 0) {
    return {0, fmt::format("the NVIDIA driver counts no devices (error {})", status)};
  }
  if (count == 0) return {0, "the NVIDIA driver sees no device: look at CUDA_VISIBLE_DEVICES"};
  return {count};
}

}  // namespace

CudaDevices find_cuda() {
  static const CudaDevices found = [] {
    CudaDevices devices = ask_driver();
    if (devices.count == 0) return devices;
    // A program that links it has it already.
    if (dlopen(kPart, RTLD_NOW | RTLD_NOLOAD) != nullptr) return devices;
    const std::string beside = libtorch_folder() / kPart;
    if (dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) return devices;
    return CudaDevices{0, fmt::format("libtorch has no CUDA part ({})", dlerror())};
  }();
  return found;
}

}  // namespace lockstep::comm

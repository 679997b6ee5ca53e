#include "lockstep/parallel/autocast.h"

#include <ATen/autocast_mode.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/transport.h"
#include "core/process/processor.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

// The major number of a GPU's compute capability, asked of the driver: libtorch's CUDA part may not
// be loaded. 0 when there is no such GPU.
int cuda_capability(at::Device device) {
  constexpr int kComputeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto attribute =
      reinterpret_cast<int (*)(int*, int, int)>(dlsym(driver, "cuDeviceGetAttribute"));
  int major = 0;
  if (init == nullptr || attribute == nullptr || init(0) != 0 ||
      attribute(&major, kComputeCapabilityMajor, std::max<int>(device.index(), 0)) != 0) {
    return 0;
  }
  return major;
}

std::string native_bf16(at::Device device) {
  if (device.is_cpu()) return native_bf16_cpu();
  const int major = device.is_cuda() ? cuda_capability(device) : 0;
  return major >= 8 ? fmt::format("compute capability {}", major) : std::string();
}

}  // namespace

at::ScalarType preferred_dtype(at::Device device) {
  return native_bf16(device).empty() ? at::kFloat : at::kBFloat16;
}

std::string describe_precision(at::Device device, at::ScalarType dtype) {
  const std::string native = native_bf16(device);
  const std::string known = native.empty() ? "no native bfloat16" : native;
  if (dtype == at::kFloat) {
    return native.empty() ? "float32 (no native bfloat16)"
                          : fmt::format("float32 (bfloat16 would be native: {})", native);
  }
  const std::string_view name = dtype == at::kBFloat16 ? "bfloat16" : "float16";
  return fmt::format("{} products ({}), float32 weights and sums", name, known);
}

Autocast::Autocast(at::Device device, at::ScalarType dtype) : type_(device.type()) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kFloat) {
    throw ConfigError(fmt::format("[autocast] {}: use bfloat16, float16, or float32 for none",
                                  comm::name_of(dtype)));
  }
  was_enabled_ = at::autocast::is_autocast_enabled(type_);
  previous_dtype_ = at::autocast::get_autocast_dtype(type_);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(type_, dtype != at::kFloat);
  if (dtype != at::kFloat) at::autocast::set_autocast_dtype(type_, dtype);
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(type_, was_enabled_);
  at::autocast::set_autocast_dtype(type_, previous_dtype_);
}

}  // namespace lockstep::parallel

#include "comm/device/device.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "comm/device/cuda.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr const char* kVariable = "LOCKSTEP_DEVICE";
// libtorch's name for a device type of an extension, as the tests have.
constexpr const char* kOther = "privateuseone";

bool is_other() { return env_text(kVariable).value_or("") == kOther; }

// Launchers that show each rank a device of its own call it 0 for all of them.
bool sees_its_own() {
  const auto visible = env_text("CUDA_VISIBLE_DEVICES");
  return visible && visible->find(',') == visible->npos;
}

std::string name_of(c10::DeviceType type) {
  return type == at::kPrivateUse1 ? kOther : c10::DeviceTypeName(type);
}

}  // namespace

DeviceKind device_from_env(DeviceKind asked) {
  const auto text = env_text(kVariable);
  if (!text || *text == "auto") return asked;
  if (*text == "cpu") return DeviceKind::Cpu;
  if (*text == "cuda" || *text == kOther) return DeviceKind::Cuda;
  throw ConfigError(
      fmt::format("[environment] {}='{}' is none of auto, cpu, cuda", kVariable, *text));
}

Devices find_devices(DeviceKind asked) {
  if (asked == DeviceKind::Cpu) return {};
  if (is_other()) {
    const int count = c10::impl::VirtualGuardImpl(at::kPrivateUse1).deviceCount();
    return {at::kPrivateUse1, count, count == 1 && sees_its_own()};
  }
  const CudaDevices found = find_cuda();
  if (found.count > 0) return {at::kCUDA, found.count, found.count == 1 && sees_its_own()};
  if (asked == DeviceKind::Auto) return {};
  return {.type = at::kCUDA, .problem = found.problem};
}

at::Device device_at(const Devices& devices, LocalRank local, Backend backend) {
  if (devices.type == at::kCPU) return at::kCPU;
  if (!devices.problem.empty() && (backend == Backend::Nccl || backend == Backend::CudaIpc)) {
    throw ConfigError(fmt::format(
        "[device] the backend {} is asked for (parallel.backend, WorldOptions::backend or "
        "LOCKSTEP_BACKEND), which is for GPUs, but {}; use auto as the backend to train without",
        backend == Backend::Nccl ? "nccl" : "cuda_ipc", devices.problem));
  }
  if (!devices.problem.empty()) {
    throw ConfigError(
        fmt::format("[device] cuda is asked for (parallel.device, WorldOptions::device or {}), but "
                    "{}; use auto or cpu to train without",
                    kVariable, devices.problem));
  }
  int index = devices.is_own ? 0 : local.rank;
  if (backend == Backend::CudaIpc && devices.count > 0) index %= devices.count;
  if (index < devices.count) return {devices.type, static_cast<c10::DeviceIndex>(index)};
  throw ConfigError(fmt::format(
      "[device] {} ranks on this host, but {} {} device{}: local rank {} has none. "
      "Start one rank a device (--nproc-per-node gpu), set LOCKSTEP_BACKEND=cuda_ipc, with "
      "which ranks share devices, or set {}=cpu",
      local.size, devices.count, name_of(devices.type), devices.count == 1 ? "" : "s", local.rank,
      kVariable));
}

void take(at::Device device) {
  if (device.is_cpu()) return;
  at::globalContext().lazyInitDevice(device.type());
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

}  // namespace lockstep::comm

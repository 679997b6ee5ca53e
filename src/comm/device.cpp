#include "comm/device.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "comm/cuda.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr const char* kVariable = "LOCKSTEP_DEVICE";
// libtorch's name for a device of somebody else's, as the tests have.
constexpr const char* kOther = "privateuseone";

bool is_other() { return env_text(kVariable).value_or("") == kOther; }

int index_of(const Seat& seat, int count, std::string_view name) {
  if (seat.local_rank < count) return seat.local_rank;
  // Launchers that show each rank a device of its own call it 0 for all of them.
  const auto visible = env_text("CUDA_VISIBLE_DEVICES");
  if (count == 1 && visible && visible->find(',') == visible->npos) return 0;
  throw ConfigError(
      fmt::format("[device] {} ranks on this host, but {} {} device{}: local rank {} has none. "
                  "Start one rank a device "
                  "(--nproc-per-node gpu), or set {}=cpu",
                  seat.local_size, count, name, count == 1 ? "" : "s", seat.local_rank, kVariable));
}

at::Device take(c10::DeviceType type, int index) {
  at::globalContext().lazyInitDevice(type);
  const at::Device device(type, static_cast<c10::DeviceIndex>(index));
  c10::impl::VirtualGuardImpl(type).setDevice(device);
  return device;
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

at::Device choose_device(DeviceKind asked, const Seat& seat) {
  if (asked == DeviceKind::Cpu) return at::kCPU;
  if (is_other()) {
    const int count = c10::impl::VirtualGuardImpl(at::kPrivateUse1).deviceCount();
    return take(at::kPrivateUse1, index_of(seat, count, kOther));
  }
  const CudaDevices found = find_cuda();
  if (found.count > 0) return take(at::kCUDA, index_of(seat, found.count, "CUDA"));
  if (asked == DeviceKind::Auto) return at::kCPU;
  throw ConfigError(fmt::format("[device] {}=cuda, but {}; use auto or cpu to train without",
                                kVariable, found.problem));
}

}  // namespace lockstep::comm

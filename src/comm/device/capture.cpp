#include "comm/device/capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <atomic>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

std::atomic<AsksForCapture> other_question = nullptr;

// The driver is there before any stream of CUDA's is; nothing here links it.
template <class Call>
Call of_driver(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver == nullptr ? nullptr : reinterpret_cast<Call>(dlsym(driver, name));
}

constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

// Exchanges what the calling thread may do while others capture.
void exchange(int& mode) {
  using Exchange = int (*)(int* mode);
  static const auto call = of_driver<Exchange>("cuThreadExchangeStreamCaptureMode");
  if (call != nullptr) call(&mode);
}

}  // namespace

bool is_capturing(const c10::Stream& stream) {
  if (const AsksForCapture question = other_question) return question(stream);
  if (stream.device_type() != c10::DeviceType::CUDA) return false;
  using Ask = int (*)(void* stream, int* status);
  static const auto ask = of_driver<Ask>("cuStreamIsCapturing");
  int status = 0;
  return ask != nullptr && ask(stream.native_handle(), &status) == 0 && status != 0;
}

bool is_capturing(at::Device device) {
  if (device.is_cpu()) return false;
  return is_capturing(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void refuse_capture(at::Device device, std::string_view what, std::string_view why) {
  if (!is_capturing(device)) return;
  throw ConfigError(
      fmt::format("{}: the current stream is capturing a CUDA graph, and {}", what, why));
}

BesideCaptures::BesideCaptures() : before_(kRelaxed) { exchange(before_); }
BesideCaptures::~BesideCaptures() { exchange(before_); }

void set_capture_question(AsksForCapture question) { other_question = question; }

}  // namespace lockstep::comm

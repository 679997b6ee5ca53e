#include "comm/device/capture.h"

#include <dlfcn.h>

#include <atomic>

namespace lockstep::comm {
namespace {

std::atomic<AsksForCapture> other_question = nullptr;

// The driver is there before any stream of CUDA's is; nothing here links it.
using StreamIsCapturing = int (*)(void* stream, int* status);

StreamIsCapturing driver_question() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  return reinterpret_cast<StreamIsCapturing>(dlsym(driver, "cuStreamIsCapturing"));
}

}  // namespace

bool is_capturing(const c10::Stream& stream) {
  if (const AsksForCapture question = other_question) return question(stream);
  if (stream.device_type() != c10::DeviceType::CUDA) return false;
  static const StreamIsCapturing ask = driver_question();
  int status = 0;
  return ask != nullptr && ask(stream.native_handle(), &status) == 0 && status != 0;
}

void set_capture_question(AsksForCapture question) { other_question = question; }

}  // namespace lockstep::comm

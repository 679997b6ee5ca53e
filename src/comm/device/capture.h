// Whether a stream records a CUDA graph.
#pragma once

#include <c10/core/Stream.h>

#include <string_view>

namespace lockstep::comm {

// False for streams of other devices than CUDA's.
bool is_capturing(const c10::Stream& stream);
// Of the device's current stream; false on the CPU.
bool is_capturing(at::Device device);
// Throws ConfigError "WHAT: the current stream is capturing a CUDA graph, and WHY" when it is.
void refuse_capture(at::Device device, std::string_view what, std::string_view why);

// While a stream captures in CUDA's global mode, a query of any event, or loading a kernel, on any
// thread, invalidates the capture. Not on this thread while this lives
// (cuThreadExchangeStreamCaptureMode, relaxed).
class BesideCaptures {
 public:
  BesideCaptures();
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int before_;
};

// Asks the driver in its place, for tests; nullptr: the driver again.
using AsksForCapture = bool (*)(const c10::Stream& stream);
void set_capture_question(AsksForCapture question);

}  // namespace lockstep::comm

// Whether a stream records a CUDA graph.
#pragma once

#include <c10/core/Stream.h>

namespace lockstep::comm {

// False for streams of other devices than CUDA's.
bool is_capturing(const c10::Stream& stream);

// Asks the driver in its place, for tests; nullptr: the driver again.
using AsksForCapture = bool (*)(const c10::Stream& stream);
void set_capture_question(AsksForCapture question);

}  // namespace lockstep::comm

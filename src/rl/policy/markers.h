#pragma once

namespace lockstep::rl {

// What ends a message in Qwen's chat formats.
inline constexpr const char* kMessageEnd = "<|im_end|>";

}  // namespace lockstep::rl

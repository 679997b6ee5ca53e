// Bytes to normalised floats.
#pragma once

#include <cstdint>

namespace lockstep::data {

struct PixelScale {
  float mean;
  float deviation;
};

constexpr int64_t kPixels = 28 * 28;

// to[i] = (from[i] / 255 - mean) / deviation for one image, with the same three roundings as
// torchvision's ToTensor and Normalize.
void normalise_image(float* to, const uint8_t* from, PixelScale scale);

}  // namespace lockstep::data

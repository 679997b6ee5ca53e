// PNG and JPEG to pixels. Free of torch, for the fuzzer's sake.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::data {

struct Pixels {
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> rgb;  // height x width x 3
};

// Larger ones are refused: a file of a few bytes may claim any size.
constexpr int64_t kMostPixels = int64_t{1} << 28;

// Of a whole file, by its first bytes. Throws DataError that begins with "[image]" and `name`.
Pixels decode_image(std::string_view bytes, const std::string& name,
                    int64_t most_pixels = kMostPixels);

// What decode_image() does for each format; an error as text, empty: none.
std::string decode_png(std::string_view bytes, int64_t most_pixels, Pixels& pixels);
std::string decode_jpeg(std::string_view bytes, int64_t most_pixels, Pixels& pixels);

}  // namespace lockstep::data

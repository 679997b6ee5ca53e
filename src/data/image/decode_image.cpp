#include "data/image/decode_image.h"

#include <fmt/format.h>

#include "lockstep/core/error.h"

namespace lockstep::data {

Pixels decode_image(std::string_view bytes, const std::string& name, int64_t most_pixels) {
  Pixels pixels;
  std::string error;
  if (bytes.starts_with("\x89PNG\r\n\x1a\n")) {
    error = decode_png(bytes, most_pixels, pixels);
  } else if (bytes.starts_with("\xff\xd8\xff")) {
    error = decode_jpeg(bytes, most_pixels, pixels);
  } else {
    error = "is neither PNG nor JPEG";
  }
  if (!error.empty()) throw DataError(fmt::format("[image] {}: {}", name, error));
  return pixels;
}

}  // namespace lockstep::data

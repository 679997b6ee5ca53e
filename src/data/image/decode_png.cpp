#include <fmt/format.h>
#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>

#include "data/image/decode_image.h"

namespace lockstep::data {
namespace {

struct Reading {
  std::string_view bytes;
  size_t position = 0;
  char error[128] = "";
};

void keep_error(png_structp png, png_const_charp text) {
  auto* reading = static_cast<Reading*>(png_get_error_ptr(png));
  std::strncpy(reading->error, text, sizeof reading->error - 1);
  std::longjmp(png_jmpbuf(png), 1);
}

void ignore_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep to, size_t count) {
  auto* reading = static_cast<Reading*>(png_get_io_ptr(png));
  if (count > reading->bytes.size() - reading->position) png_error(png, "truncated");
  std::memcpy(to, reading->bytes.data() + reading->position, count);
  reading->position += count;
}

// libpng leaves by longjmp: nothing here has a destructor.
bool read_header(png_structp png, png_infop info, int64_t* height, int64_t* width) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_read_info(png, info);
  *height = png_get_image_height(png, info);
  *width = png_get_image_width(png, info);
  return true;
}

bool read_rows(png_structp png, png_infop info, uint8_t* pixels, int64_t height, int64_t width) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_expand(png);
  png_set_strip_16(png);
  png_set_gray_to_rgb(png);
  png_set_strip_alpha(png);
  const int passes = png_set_interlace_handling(png);
  png_read_update_info(png, info);
  if (png_get_rowbytes(png, info) != static_cast<size_t>(width) * 3) {
    png_error(png, "rows of an unexpected length");
  }
  for (int pass = 0; pass < passes; ++pass) {
    for (int64_t row = 0; row < height; ++row) {
      png_read_row(png, pixels + row * width * 3, nullptr);
    }
  }
  png_read_end(png, nullptr);
  return true;
}

}  // namespace

std::string decode_png(std::string_view bytes, int64_t most_pixels, Pixels& pixels) {
  Reading reading{.bytes = bytes};
  png_structp png =
      png_create_read_struct(PNG_LIBPNG_VER_STRING, &reading, keep_error, ignore_warning);
  if (png == nullptr) return "libpng cannot be started";
  png_infop info = png_create_info_struct(png);
  png_set_read_fn(png, &reading, read_bytes);
  std::string error;
  if (info == nullptr || !read_header(png, info, &pixels.height, &pixels.width)) {
    error = fmt::format("damaged PNG: {}", reading.error);
  } else if (pixels.height > most_pixels / std::max<int64_t>(pixels.width, 1)) {
    error = fmt::format("a PNG of {} x {} pixels is more than {}", pixels.height, pixels.width,
                        most_pixels);
  } else {
    pixels.rgb.resize(static_cast<size_t>(pixels.height * pixels.width * 3));
    if (!read_rows(png, info, pixels.rgb.data(), pixels.height, pixels.width)) {
      error = fmt::format("damaged PNG: {}", reading.error);
    }
  }
  png_destroy_read_struct(&png, &info, nullptr);
  return error;
}

}  // namespace lockstep::data

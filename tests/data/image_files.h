// PNG and JPEG files of given pixels.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <jpeglib.h>
#include <png.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace lockstep::test {

// uint8, height x width x channels (1 grey, 2 with alpha, 3 RGB, 4 with alpha); with 16 bits each
// value is the upper byte.
inline std::string png_of(const at::Tensor& image, int bits = 8) {
  std::string bytes;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(
      png, &bytes,
      [](png_structp writing, png_bytep from, size_t count) {
        static_cast<std::string*>(png_get_io_ptr(writing))
            ->append(reinterpret_cast<const char*>(from), count);
      },
      nullptr);
  constexpr int kTypes[] = {PNG_COLOR_TYPE_GRAY, PNG_COLOR_TYPE_GRAY_ALPHA, PNG_COLOR_TYPE_RGB,
                            PNG_COLOR_TYPE_RGB_ALPHA};
  const auto height = image.size(0), width = image.size(1), channels = image.size(2);
  png_set_IHDR(png, info, static_cast<png_uint_32>(width), static_cast<png_uint_32>(height), bits,
               kTypes[channels - 1], PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT,
               PNG_FILTER_TYPE_DEFAULT);
  png_write_info(png, info);
  const at::Tensor pixels = image.contiguous();
  std::vector<uint8_t> row;
  for (int64_t y = 0; y < height; ++y) {
    row.clear();
    for (int64_t i = 0; i < width * channels; ++i) {
      row.push_back(pixels.const_data_ptr<uint8_t>()[y * width * channels + i]);
      if (bits == 16) row.push_back(7);
    }
    png_write_row(png, row.data());
  }
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  return bytes;
}

// uint8, height x width x 3.
inline std::string jpeg_of(const at::Tensor& image) {
  jpeg_compress_struct jpeg{};
  jpeg_error_mgr errors{};
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_compress(&jpeg);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&jpeg, &memory, &size);
  jpeg.image_height = static_cast<JDIMENSION>(image.size(0));
  jpeg.image_width = static_cast<JDIMENSION>(image.size(1));
  jpeg.input_components = 3;
  jpeg.in_color_space = JCS_RGB;
  jpeg_set_defaults(&jpeg);
  jpeg_start_compress(&jpeg, TRUE);
  const at::Tensor pixels = image.contiguous();
  for (int64_t y = 0; y < image.size(0); ++y) {
    JSAMPROW row = const_cast<uint8_t*>(pixels.const_data_ptr<uint8_t>()) + y * image.size(1) * 3;
    jpeg_write_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_compress(&jpeg);
  const std::string bytes(reinterpret_cast<char*>(memory), size);
  jpeg_destroy_compress(&jpeg);
  std::free(memory);
  return bytes;
}

}  // namespace lockstep::test

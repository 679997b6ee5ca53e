#include <fmt/format.h>
#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <csetjmp>

#include "data/image/decode_image.h"

namespace lockstep::data {
namespace {

struct Errors {
  jpeg_error_mgr base;  // first: libjpeg knows this one only
  std::jmp_buf leave;
};

[[noreturn]] void leave(j_common_ptr jpeg) {
  std::longjmp(reinterpret_cast<Errors*>(jpeg->err)->leave, 1);
}

// A file that ends early gives grey pixels and a warning; other warnings are of things that do not
// change the picture.
void note_message(j_common_ptr jpeg, int level) {
  const int code = jpeg->err->msg_code;
  if (level < 0 &&
      (code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER || code == JWRN_HUFF_BAD_CODE)) {
    leave(jpeg);
  }
}

void ignore_text(j_common_ptr) {}

std::string text_of(j_common_ptr jpeg) {
  char text[JMSG_LENGTH_MAX];
  jpeg->err->format_message(jpeg, text);
  return text;
}

// libjpeg leaves by longjmp: nothing here has a destructor.
bool read_header(jpeg_decompress_struct* jpeg, std::string_view bytes) {
  if (setjmp(reinterpret_cast<Errors*>(jpeg->err)->leave) != 0) return false;
  jpeg_create_decompress(jpeg);
  jpeg_mem_src(jpeg, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(jpeg, TRUE);
  return true;
}

bool read_rows(jpeg_decompress_struct* jpeg, uint8_t* pixels, size_t stride) {
  if (setjmp(reinterpret_cast<Errors*>(jpeg->err)->leave) != 0) return false;
  jpeg_start_decompress(jpeg);
  while (jpeg->output_scanline < jpeg->output_height) {
    JSAMPROW row = pixels + jpeg->output_scanline * stride;
    jpeg_read_scanlines(jpeg, &row, 1);
  }
  jpeg_finish_decompress(jpeg);
  return true;
}

// Adobe's CMYK is stored inverted, so that a product of two shares of light remains.
void from_cmyk(const std::vector<uint8_t>& cmyk, bool inverted, std::vector<uint8_t>& rgb) {
  for (size_t i = 0; i * 4 < cmyk.size(); ++i) {
    const auto light = [&](size_t c) {
      const int value = cmyk[i * 4 + c];
      return inverted ? value : 255 - value;
    };
    for (size_t c = 0; c < 3; ++c) {
      rgb[i * 3 + c] = static_cast<uint8_t>(light(c) * light(3) / 255);
    }
  }
}

}  // namespace

std::string decode_jpeg(std::string_view bytes, int64_t most_pixels, Pixels& pixels) {
  jpeg_decompress_struct jpeg{};
  Errors errors{};
  jpeg.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = leave;
  errors.base.emit_message = note_message;
  errors.base.output_message = ignore_text;
  std::string error;
  if (!read_header(&jpeg, bytes)) {
    error = "damaged JPEG: " + text_of(reinterpret_cast<j_common_ptr>(&jpeg));
  } else {
    pixels.height = jpeg.image_height;
    pixels.width = jpeg.image_width;
    const bool cmyk = jpeg.jpeg_color_space == JCS_CMYK || jpeg.jpeg_color_space == JCS_YCCK;
    jpeg.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
    if (pixels.height > most_pixels / std::max<int64_t>(pixels.width, 1)) {
      error = fmt::format("a JPEG of {} x {} pixels is more than {}", pixels.height, pixels.width,
                          most_pixels);
    } else {
      const auto count = static_cast<size_t>(pixels.height * pixels.width);
      std::vector<uint8_t> four(cmyk ? count * 4 : 0);
      pixels.rgb.resize(count * 3);
      const auto width = static_cast<size_t>(pixels.width);
      if (!read_rows(&jpeg, cmyk ? four.data() : pixels.rgb.data(), width * (cmyk ? 4 : 3))) {
        error = "damaged JPEG: " + text_of(reinterpret_cast<j_common_ptr>(&jpeg));
      } else if (cmyk) {
        from_cmyk(four, jpeg.saw_Adobe_marker != 0, pixels.rgb);
      }
    }
  }
  jpeg_destroy_decompress(&jpeg);
  return error;
}

}  // namespace lockstep::data

#include "checkpoint/format/conversion.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} << 16 & 0x80000000;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00)
    return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000));
  const float small = static_cast<float>(magnitude) * 0x1p-24F;
  return sign == 0 ? small : -small;
}

uint16_t to_f16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t out = 0x7c00;                     // 65520 and above are nearer to 65536 than to 65504
  if (magnitude > 0x7f800000) out = 0x7e00;  // NaN
  if (magnitude < 0x477ff000) out = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Below the least normal number there are multiples of 2^-24.
  if (magnitude < 0x38800000) {
    out = static_cast<uint32_t>(std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24F));
  }
  return static_cast<uint16_t>(sign | out);
}

// One type's elements, and float32.
struct Codec {
  int64_t bytes;
  float (*read)(const char*);
  void (*write)(char*, float);
};

template <class T>
void store(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

Codec codec_of(std::string_view dtype) {
  if (dtype == "F64") {
    return {8, [](const char* at) { return static_cast<float>(load<double>(at)); },
            [](char* at, float value) { store(at, static_cast<double>(value)); }};
  }
  if (dtype == "F32") return {4, load<float>, store<float>};
  if (dtype == "F16") {
    return {2, [](const char* at) { return from_f16(load<uint16_t>(at)); },
            [](char* at, float value) { store(at, to_f16(value)); }};
  }
  return {2, [](const char* at) { return from_bf16(load<uint16_t>(at)); },
          [](char* at, float value) { store(at, to_bf16(value)); }};
}

bool is_finite(std::string_view dtype, const char* at) {
  return dtype == "F64" ? std::isfinite(load<double>(at)) : std::isfinite(codec_of(dtype).read(at));
}

}  // namespace

bool is_convertible(std::string_view dtype) {
  return dtype == "F64" || dtype == "F32" || dtype == "F16" || dtype == "BF16";
}

TensorBytes converted(std::string_view bytes, std::string_view from, const Dtype& to) {
  const Codec source = codec_of(from), target = codec_of(to.name());
  const auto count = static_cast<int64_t>(bytes.size()) / source.bytes;
  const auto size = static_cast<size_t>(count * target.bytes);
  auto memory = std::make_unique_for_overwrite<char[]>(size);
  for (int64_t i = 0; i < count; ++i) {
    const char* const at = bytes.data() + i * source.bytes;
    char* const into = memory.get() + i * target.bytes;
    target.write(into, source.read(at));
    if (std::isinf(target.read(into)) && is_finite(from, at)) {
      const double value = from == "F64" ? load<double>(at) : source.read(at);
      throw CheckpointError(fmt::format("{} is beyond the largest {}", value, to.name()));
    }
  }
  return {std::move(memory), size};
}

}  // namespace lockstep::checkpoint

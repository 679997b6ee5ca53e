#include "data/image/pixels.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace lockstep::data {
namespace {

// Divisions, everywhere: multiplying by the reciprocals differs from Python in the last bit of 220
// of the 256 values and would save 5 us of 14 for a batch of 64. A table of 256 floats takes 20 us.
void normalise_plain(float* to, const uint8_t* from, PixelScale scale) {
  for (int64_t i = 0; i < kPixels; ++i) {
    to[i] = (static_cast<float>(from[i]) / 255.0F - scale.mean) / scale.deviation;
  }
}

#ifdef __x86_64__
// By hand: g++ 12 vectorises the loop above to half the width, twice as slow.
[[gnu::target("avx2")]] void normalise_avx2(float* to, const uint8_t* from, PixelScale scale) {
  constexpr int64_t kLanes = 8;
  static_assert(kPixels % kLanes == 0);
  const __m256 most = _mm256_set1_ps(255.0F);
  const __m256 mean = _mm256_set1_ps(scale.mean);
  const __m256 deviation = _mm256_set1_ps(scale.deviation);
  for (int64_t i = 0; i < kPixels; i += kLanes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i));
    const __m256 value = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    const __m256 centred = _mm256_sub_ps(_mm256_div_ps(value, most), mean);
    _mm256_storeu_ps(to + i, _mm256_div_ps(centred, deviation));
  }
}

const auto normalise_best = __builtin_cpu_supports("avx2") ? normalise_avx2 : normalise_plain;
#else
const auto normalise_best = normalise_plain;
#endif

}  // namespace

void normalise_image(float* to, const uint8_t* from, PixelScale scale) {
  normalise_best(to, from, scale);
}

}  // namespace lockstep::data

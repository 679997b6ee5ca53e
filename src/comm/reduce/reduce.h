// Elementwise reduction of the ranks' buffers in the one fixed order. No torch: sanitizers and the
// kernels' own compiler flags need it so.
#pragma once

#include <cstdint>

namespace lockstep::comm {

enum class Element : uint8_t {
  Float32,
  Float64,
  Float16,
  BFloat16,
  Int8,
  Int16,
  Int32,
  Int64,
  UInt8,
  Bool,
  UInt16,
  UInt32,
  UInt64,
  Float8E4M3,  // without infinity: larger numbers become the largest, 448
  Float8E5M2,
  // Pairs (real, imaginary), for Product alone: a sum is one of the parts.
  Complex64,
  Complex128,
};
enum class Combine : uint8_t { Sum, Min, Max, Product, And, Or, Xor };

int64_t size_of(Element element);

// targets[t][i] = sources[0][i] + ... + sources[n - 1][i] for every i < count and t < target_count,
// where + is `combine` and the order is the binary tree over sources: n of them split at the
// largest power of two below n. Each node rounds to the element's type. The root is then divided by
// `divide_by`. A target may be one of the sources; other overlaps are not allowed. All pointers are
// aligned to the element.
struct Reduction {
  Element element = Element::Float32;
  Combine combine = Combine::Sum;
  int divide_by = 1;
};
void reduce(const Reduction& reduction, const void* const* sources, int source_count,
            void* const* targets, int target_count, int64_t count);

// The same compiled for one instruction set; reduce() picks the best that the machine has.
namespace baseline {
void reduce(const Reduction&, const void* const*, int, void* const*, int, int64_t);
}
namespace avx2 {
void reduce(const Reduction&, const void* const*, int, void* const*, int, int64_t);
}
namespace avx512 {
void reduce(const Reduction&, const void* const*, int, void* const*, int, int64_t);
}

}  // namespace lockstep::comm

#include "comm/reduce/reduce.h"

namespace lockstep::comm {
namespace {

using Kernel = decltype(&baseline::reduce);

Kernel best_kernel() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return &avx512::reduce;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return &avx2::reduce;
#endif
  return &baseline::reduce;
}

}  // namespace

int64_t size_of(Element element) {
  switch (element) {
    case Element::Complex128:
      return 16;
    case Element::Float64:
    case Element::Int64:
    case Element::UInt64:
    case Element::Complex64:
      return 8;
    case Element::Float32:
    case Element::Int32:
    case Element::UInt32:
      return 4;
    case Element::Float16:
    case Element::BFloat16:
    case Element::Int16:
    case Element::UInt16:
      return 2;
    case Element::Int8:
    case Element::UInt8:
    case Element::Bool:
    case Element::Float8E4M3:
    case Element::Float8E5M2:
      return 1;
  }
  return 0;
}

void reduce(const Reduction& reduction, const void* const* sources, int source_count,
            void* const* targets, int target_count, int64_t count) {
  static const Kernel kernel = best_kernel();
  kernel(reduction, sources, source_count, targets, target_count, count);
}

}  // namespace lockstep::comm

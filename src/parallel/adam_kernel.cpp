#include "parallel/adam_kernel.h"

namespace lockstep::parallel {

AdamKernel adam_kernel() {
#ifdef __x86_64__
  static const AdamKernel best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
      return &avx512::adam;
    }
    const bool suits = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return suits ? &avx2::adam : nullptr;
  }();
  return best;
#else
  return nullptr;
#endif
}

}  // namespace lockstep::parallel

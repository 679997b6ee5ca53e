#include "parallel/optim/adam_kernel.h"

#include <ATen/Version.h>

namespace lockstep::parallel {

AdamKernel adam_kernel() {
#ifdef __x86_64__
  static const AdamKernel best = []() -> AdamKernel {
    // ATEN_CPU_CAPABILITY=default: libtorch's own kernel then has other bits.
    const auto libtorchs = at::get_cpu_capability();
    if (libtorchs != "AVX2" && libtorchs != "AVX512") return nullptr;
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

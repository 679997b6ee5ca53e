#include "core/process/cpu_bf16.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace lockstep {

std::string native_bf16_cpu() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("amx-bf16")) return "AMX";
  if (__builtin_cpu_supports("avx512bf16")) return "AVX512_BF16";
#elif defined(__aarch64__)
  constexpr unsigned long kHwcap2Bf16 = 1UL << 14;  // HWCAP2_BF16 of the Linux kernel
  if (getauxval(AT_HWCAP2) & kHwcap2Bf16) return "Arm BF16";
#endif
  return {};
}

}  // namespace lockstep

// One step of Adam or AdamW over float32 elements, in one pass. No torch: the kernel is compiled
// for each instruction set.
#pragma once

#include <cstdint>

namespace lockstep::parallel {

struct AdamStep {
  float keep;   // of a parameter, for AdamW: 1 - lr * weight_decay; 1 for Adam
  float decay;  // times the parameter, added to its gradient: for Adam; 0 for AdamW
  float beta2;
  float new_average;  // 1 - beta1
  float new_square;   // 1 - beta2
  float size;         // lr / (1 - beta1^step)
  float root_scale;   // sqrt(1 - beta2^step)
  float eps;
};

// Elements of one tensor, or `count` of them that begin at a multiple of kAdamBlock.
struct AdamElements {
  float* parameter;
  const float* gradient;
  float* average;  // of gradients
  float* square;   // average of squared gradients
  int64_t count;
};
constexpr int64_t kAdamBlock = 1024;

using AdamKernel = void (*)(const AdamStep&, const AdamElements&);

// The bits of at::_fused_adam_ and at::_fused_adamw_ on one thread of a processor with AVX2, at the
// speed of memory. nullptr for other processors, and where ATEN_CPU_CAPABILITY keeps libtorch from
// using AVX2.
AdamKernel adam_kernel();

namespace avx2 {
void adam(const AdamStep&, const AdamElements&);
}
namespace avx512 {
void adam(const AdamStep&, const AdamElements&);
}

}  // namespace lockstep::parallel

// Mixed precision (Micikevicius et al., ICLR 2018): products in a narrow dtype, sums and weights in
// float32.
//
//   const at::ScalarType dtype = preferred_dtype(world.device());
//   {
//     const Autocast autocast(world.device(), dtype);
//     loss = cross_entropy(net->forward(x), y);
//   }
//   loss.backward();   // outside: gradients take the dtypes that forward chose
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/core/compiler.h"

namespace lockstep::parallel {

// bfloat16 where the hardware multiplies it natively (AVX512_BF16 or AMX, Armv8.6 BF16; CUDA from
// compute capability 8.0, Ampere, on), else float32, with which Autocast does nothing.
at::ScalarType preferred_dtype(at::Device device);

// One line for a program's header, such as "bfloat16 products (AVX512_BF16), float32 weights and
// sums" or "float32 (no native bfloat16)".
std::string describe_precision(at::Device device, at::ScalarType dtype);

// While it lives, this thread's operations on the device's type choose their dtype as PyTorch's
// torch.autocast does: matrix products and convolutions compute in `dtype`, what needs range or
// precision (softmax, losses, norms) in float32. Guards nest; a float32 one inside disables it for
// a part. The end of a guard, by exception too, restores what was before; the end of the outermost
// drops the cached casts of weights, so a guard lives for one forward, not for many steps. Destroy
// guards in the reverse order of construction, on the thread that made them.
//
// Throws ConfigError for a dtype other than bfloat16, float16 and float32.
class [[nodiscard]] Autocast {
 public:
  // Begins it, on this thread.
  Autocast(at::Device device, at::ScalarType dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType type_;
  bool was_enabled_;
  at::ScalarType previous_dtype_;
};

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::Autocast;
using parallel::describe_precision;
using parallel::preferred_dtype;
}  // namespace lockstep

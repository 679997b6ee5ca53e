// Compiled once per instruction set, as LOCKSTEP_ISA.
#include <cmath>

#include "parallel/optim/adam_kernel.h"

namespace lockstep::parallel::LOCKSTEP_ISA {
namespace {

// Which product of the new square is rounded before the sum: torch's kernel has its remainder
// compiled the other way round.
enum class Part { Vectors, Remainder };

template <bool kDecays, Part kPart>
void run(const AdamStep& s, const AdamElements& e, int64_t begin, int64_t end) {
  // Copies, which no store can change.
  const AdamStep step = s;
  float* const parameters = e.parameter;
  const float* const gradients = e.gradient;
  float* const averages = e.average;
  float* const squares = e.square;
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    const float parameter = parameters[i] * step.keep;
    const float gradient = kDecays ? std::fma(parameter, step.decay, gradients[i]) : gradients[i];
    const float average = std::fma(step.new_average, gradient - averages[i], averages[i]);
    const float fresh = step.new_square * gradient;
    const float square = kPart == Part::Vectors
                             ? std::fma(fresh, gradient, squares[i] * step.beta2)
                             : std::fma(squares[i], step.beta2, fresh * gradient);
    averages[i] = average;
    squares[i] = square;
    const float root = std::sqrt(square) / step.root_scale + step.eps;
    parameters[i] = parameter + -step.size * average / root;
  }
}

}  // namespace

void adam(const AdamStep& step, const AdamElements& elements) {
  constexpr int64_t kVector = 8;
  const int64_t whole = elements.count / kVector * kVector;
  if (step.decay != 0) {
    run<true, Part::Vectors>(step, elements, 0, whole);
    run<true, Part::Remainder>(step, elements, whole, elements.count);
  } else {
    run<false, Part::Vectors>(step, elements, 0, whole);
    run<false, Part::Remainder>(step, elements, whole, elements.count);
  }
}

}  // namespace lockstep::parallel::LOCKSTEP_ISA

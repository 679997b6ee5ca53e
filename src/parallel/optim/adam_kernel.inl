// Compiled once per instruction set, as LOCKSTEP_ISA.
#include <cmath>

#include "parallel/optim/adam_kernel.h"

namespace lockstep::parallel::LOCKSTEP_ISA {
namespace {

// Which product of the new square is rounded before the sum: torch's kernel has its remainder
// compiled the other way round.
enum class Part { Vectors, Remainder };

// As torch's lerp: from the nearer end, so that a weight of 1 gives the gradient itself.
enum class From { Average, Gradient };

template <bool kDecays, From kFrom, Part kPart>
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
    const float toward = gradient - averages[i];
    const float average = kFrom == From::Average ? std::fma(step.new_average, toward, averages[i])
                                                 : std::fma(step.new_average - 1, toward, gradient);
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

template <bool kDecays, From kFrom>
void run_all(const AdamStep& step, const AdamElements& elements) {
  constexpr int64_t kVector = 8;
  const int64_t whole = elements.count / kVector * kVector;
  run<kDecays, kFrom, Part::Vectors>(step, elements, 0, whole);
  run<kDecays, kFrom, Part::Remainder>(step, elements, whole, elements.count);
}

template <bool kDecays>
void run_from(const AdamStep& step, const AdamElements& elements) {
  step.new_average < 0.5f ? run_all<kDecays, From::Average>(step, elements)
                          : run_all<kDecays, From::Gradient>(step, elements);
}

}  // namespace

void adam(const AdamStep& step, const AdamElements& elements) {
  step.decay != 0 ? run_from<true>(step, elements) : run_from<false>(step, elements);
}

}  // namespace lockstep::parallel::LOCKSTEP_ISA

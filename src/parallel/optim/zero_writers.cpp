// One copy of the parameters for all ranks, and who writes to it between two steps.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/loads.h"
#include "lockstep/core/error.h"
#include "parallel/nn/recompute_checks.h"
#include "parallel/optim/zero_parts.h"

namespace lockstep::parallel {

void ZeroOptimizer::Parts::note_versions() {
  if (!shared) return;
  versions.clear();
  for (const auto& parameter : parameters) versions.push_back(version_of(parameter));
  loads = checkpoint::loads();
}

// 1 for each parameter that this rank has written to; one that has memory of its own by now is not
// the ranks' any more.
at::Tensor ZeroOptimizer::Parts::written() const {
  if (!shared) return {};
  at::Tensor by_parameter = at::zeros({std::ssize(parameters)}, at::kInt);
  if (loads != checkpoint::loads()) return by_parameter;
  auto* const counts = by_parameter.mutable_data_ptr<int32_t>();
  for (size_t i = 0; i < parameters.size(); ++i) {
    counts[i] = !is_elsewhere(i) && version_of(parameters[i]) != versions[i] ? 1 : 0;
  }
  return by_parameter;
}

// What two ranks do to one memory is done twice: p.add_(e) and p.sub_(e), or p.mul_(0.5).
void ZeroOptimizer::Parts::meet(at::Tensor written) {
  call([&](const comm::CallOptions& options) {
    group.all_reduce(written, comm::ReduceOp::Sum, options).wait();
  });
  const auto* const counts = written.const_data_ptr<int32_t>();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (counts[i] < 2) continue;
    throw ConfigError(fmt::format(
        "[zero] parameter {} of shape [{}] was written to on {} ranks since the last step, and "
        "with ZeroOptions::share_parameters it is one for all ranks: p.mul_(0.5) on two ranks is "
        "p.mul_(0.25). Leave share_parameters out where ranks change parameters between steps, as "
        "for sharpness-aware minimisation (SAM), or let one rank write between two barriers",
        i, fmt::join(parameters[i].sizes(), ", "), counts[i]));
  }
}

}  // namespace lockstep::parallel

#include "lockstep/parallel/averager.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <set>

#include "lockstep/core/error.h"
#include "parallel/lanes/rules.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {

Averager::Averager(const ModuleRef& module, std::vector<AverageLevel> levels, int64_t warm_up)
    : module_(module), levels_(std::move(levels)), warm_up_(warm_up) {
  if (levels_.empty()) throw ConfigError("[averager] no group to average over");
  for (size_t i = 0; i < levels_.size(); ++i) {
    levels_[i].group.refuse_python_ranks("Averager");
    const int64_t period = levels_[i].period, before = i == 0 ? 1 : levels_[i - 1].period;
    if (period < 1 || period % before != 0) {
      throw ConfigError(fmt::format("[averager] period {} of level {} is not a multiple of {}",
                                    period, i, before));
    }
  }
}

bool Averager::step() {
  for (const auto& level : levels_) {
    refuse_lanes(level.group, "averager",
                 "leave it out, Ddp keeps the parameters the same on all ranks");
  }
  if (module_.has_expired()) {
    throw ConfigError(
        "[averager] the module is not there any more: construct another Averager for the one in "
        "its place");
  }
  ++steps_;
  if (steps_ <= warm_up_) return false;
  for (size_t level = levels_.size(); level-- > 0;) {
    const auto& [group, period] = levels_[level];
    if ((steps_ - warm_up_) % period != 0) continue;
    const at::NoGradGuard no_grad;
    std::vector<comm::Work> works;
    std::set<const at::TensorImpl*> seen;
    for (const auto& [name, parameter] : module_.parameters()) {
      const bool averaged = parameter.is_floating_point() || parameter.is_complex();
      // One that has several names would be in two collectives at once.
      if (!averaged || parameter.numel() == 0) continue;
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      works.push_back(
          group.all_reduce(as_reals(parameter.detach()), ReduceOp::Average, {.label = "averager"}));
    }
    for (auto& work : works) work.wait();
    return true;
  }
  return false;
}

}  // namespace lockstep::parallel

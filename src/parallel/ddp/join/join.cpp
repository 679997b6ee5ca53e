#include "lockstep/parallel/join.h"

#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/zero_optimizer.h"

namespace lockstep::parallel {

Join::Join(std::vector<std::reference_wrapper<Joinable>> joinables, JoinOptions options)
    : joinables_(std::move(joinables)), options_(options) {
  if (joinables_.empty()) throw ConfigError("[join] nothing to join: name the Ddp");
  if (dynamic_cast<Optimizer*>(&joinables_.front().get()) != nullptr) {
    throw ConfigError(
        "[join] an optimizer is named first, which cannot tell whether any rank has a batch: name "
        "the Ddp before it");
  }
  const auto* first = dynamic_cast<Ddp*>(&joinables_.front().get());
  for (Joinable& joinable : joinables_) {
    auto* ddp = dynamic_cast<Ddp*>(&joinable);
    if (first != nullptr && ddp != nullptr) ddp->begin_join(*first);
  }
  for (Joinable& joinable : joinables_) joinable.join(options_);
}

void Join::finish(const std::function<void()>& rest_of_step) {
  for (Joinable& joinable : joinables_) {
    if (!rest_of_step || dynamic_cast<Optimizer*>(&joinable) == nullptr) continue;
    throw ConfigError(
        "[join] an optimizer is joined, and finish() is given the rest of the step: let the one or "
        "the other make the optimizer's steps");
  }
  while (joinables_.front().get().shadow()) {
    if (options_.uneven == Uneven::Throw) {
      throw DataError(
          "[join] this rank has run out of batches while other ranks have more: give all ranks as "
          "many (a sampler that pads or drops), or use Uneven::Continue");
    }
    for (size_t i = 1; i < joinables_.size(); ++i) joinables_[i].get().shadow();
    if (rest_of_step) rest_of_step();
  }
  for (Joinable& joinable : joinables_) joinable.leave();
}

}  // namespace lockstep::parallel

#include "lockstep/parallel/join.h"

#include "lockstep/core/error.h"

namespace lockstep::parallel {

Join::Join(std::vector<std::reference_wrapper<Joinable>> joinables, JoinOptions options)
    : joinables_(std::move(joinables)), options_(options) {
  if (joinables_.empty()) throw ConfigError("[join] nothing to join: name the Ddp");
  for (Joinable& joinable : joinables_) joinable.join(options_);
}

void Join::finish() {
  while (joinables_.front().get().shadow()) {
    if (options_.uneven == Uneven::Throw) {
      throw DataError(
          "[join] this rank has run out of batches while other ranks have more: give all ranks as "
          "many (a sampler that pads or drops), or use Uneven::Continue");
    }
    for (size_t i = 1; i < joinables_.size(); ++i) joinables_[i].get().shadow();
  }
  for (Joinable& joinable : joinables_) joinable.leave();
}

}  // namespace lockstep::parallel

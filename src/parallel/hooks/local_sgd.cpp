#include <fmt/format.h>
#include <torch/types.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/hooks/state.h"

namespace lockstep::parallel {

comm::Work LocalSgd::start(const Group& group, const Bucket& bucket) {
  const Group& over = communicates() ? group : options_.subgroup;
  // A pass ends with its last bucket; the next one begins with bucket 0.
  if (bucket.last) ++iteration_;
  gradients_ = bucket.index == 0 ? 0 : gradients_;
  gradients_ += bucket.names.size();
  if (over.size() == 1) return {};
  bytes_ += static_cast<int64_t>(bucket.flat.nbytes());
  return over.all_reduce(bucket.flat, ReduceOp::Average,
                         {.label = fmt::format("bucket {}", bucket.index)});
}

// On all ranks alike, so only of passes that all of them were in.
void LocalSgd::end_pass(const std::vector<std::string>& unused) {
  const bool is_empty = gradients_ > 0 && unused.size() >= gradients_;
  if (is_empty && iteration_ <= options_.start_iteration) --iteration_;
}

void refuse_local_gradients(const std::vector<at::Tensor>& parameters, std::string_view address) {
  for (const auto& parameter : parameters) {
    const auto hook = hook_of(parameter);
    if (!hook || !hook->subgroup()) continue;
    throw ConfigError(fmt::format(
        "[{}] the hook {} leaves ranks with gradients and parameters of their own, and here each "
        "rank updates a part of them for all: use an ordinary optimizer beside it",
        address, hook->name()));
  }
}

Tensors LocalSgd::state() const {
  return {{"iteration", at::scalar_tensor(iteration_, at::kLong)}};
}

void LocalSgd::restore(const Tensors& state) {
  check(state);
  iteration_ = number_in(name(), state, "iteration");
}

void LocalSgd::check(const Tensors& state) const {
  number_in(name(), state, "iteration");
  for (const auto& [other, tensor] : state) {
    if (other != "iteration") refuse_state(name(), fmt::format("this hook keeps no '{}'", other));
  }
}

}  // namespace lockstep::parallel

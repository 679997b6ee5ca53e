// The part of Reducer that makes what one rank refuses an error of all ranks.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "parallel/ddp/reducer/reducer.h"

namespace lockstep::parallel {

void Reducer::object_to_gradient(size_t parameter) {
  object(change());
  const at::Tensor& gradient = parameters_[parameter].tensor.grad();
  const at::Tensor& view = buckets_.view(parameter);
  const bool is_dense = gradient.layout() == at::kStrided;
  object(fmt::format(
      "the gradient of parameter '{}' was replaced by a {}{} tensor of sizes [{}] on {}, but is "
      "averaged as {} [{}] on {}: put only tensors like the parameter in its place",
      parameters_[parameter].name, is_dense ? "" : "sparse ", comm::name_of(gradient.scalar_type()),
      fmt::join(gradient.sizes(), ", "), gradient.device().str(), comm::name_of(view.scalar_type()),
      fmt::join(view.sizes(), ", "), view.device().str()));
}

bool Reducer::fits(const at::Tensor& gradient, size_t parameter) const {
  const at::Tensor& view = buckets_.view(parameter);
  return gradient.is_same(view) ||
         (gradient.layout() == at::kStrided && gradient.scalar_type() == view.scalar_type() &&
          gradient.device() == view.device() && gradient.sizes() == view.sizes());
}

// On a device the flags cannot be read without waiting for it: there the group ends, which tells
// the others.
void Reducer::refuse_objected() {
  if (!flags_.elements().is_cpu() || quiet_) {
    if (!objection_.is_raised()) return;
    if (lanes_) abandon_lanes();
    const auto text = fmt::format("[ddp] rank {}: {}", group_.rank(), objection_.take());
    if (!quiet_) group_.transport().abort_all(text);
    throw ConfigError(text);
  }
  wait_for_works();
  if (!flags_.objected()) return;
  flags_.clear_objection();
  forget();
  if (lanes_) abandon_lanes();
  end_refused_pass();
  objection_.refuse(group_, "ddp", call("objections"));
}

// What the hook has sent becomes no gradient.
void Reducer::end_refused_pass() const {
  if (!options_.hook) return;
  std::vector<std::string> all;
  for (size_t i = 0; i < dense_; ++i) all.push_back(parameters_[i].name);
  options_.hook->end_pass(all);
}

}  // namespace lockstep::parallel

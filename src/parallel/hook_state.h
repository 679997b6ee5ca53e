// What hooks keep from pass to pass.
#pragma once

#include <map>
#include <string>

#include "lockstep/parallel/hooks.h"

namespace lockstep::parallel {

// Adds each parameter's residual to its gradient; a parameter without one gets a zero one.
void add_residuals(const Bucket& bucket, Tensors& residuals);
// residual = gradient - what of it was sent, when add_residuals() left the gradient as it is now.
// `sent` is laid out as bucket.flat.
void keep_residuals(const Bucket& bucket, const at::Tensor& sent, Tensors& residuals);

// Copies of `state`. Throws ConfigError, which names the hook, when a name does not begin with one
// of `prefixes`.
Tensors checked_state(std::string_view hook, const Tensors& state,
                      std::initializer_list<std::string_view> prefixes);
// The number in state[name], which checked_state() has let pass. Throws ConfigError when it is not
// there.
int64_t number_in(std::string_view hook, const Tensors& state, const std::string& name);

}  // namespace lockstep::parallel

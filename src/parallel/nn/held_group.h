// How an autograd context keeps a group.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

struct HeldGroup : torch::CustomClassHolder {
  explicit HeldGroup(Group g) : group(std::move(g)) {}
  Group group;
};

inline void hold_group(torch::autograd::AutogradContext& context, const Group& group) {
  context.saved_data["group"] = at::IValue::make_capsule(c10::make_intrusive<HeldGroup>(group));
}

inline Group held_group(torch::autograd::AutogradContext& context) {
  return static_cast<HeldGroup&>(*context.saved_data["group"].toCapsule()).group;
}

}  // namespace lockstep::parallel

// Replacements for the functions and classes that pickles of torch.save name.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/format/torch_save/pickle.h"

namespace lockstep::checkpoint {

using Complain = std::function<void(const std::string&)>;  // throws

// Whether a pickle may name it: "torch._utils._rebuild_tensor_v2".
bool is_known_name(const std::string& name);

// What a call gives. `complain` throws.
PickledValue call_of(const std::string& name, const std::vector<const PickledValue*>& arguments,
                     const Complain& complain);

// A storage, from the tuple that stands for it: ('storage', type, key, place, elements).
PickledValue storage_of(const PickledValue& id, const Complain& complain);

}  // namespace lockstep::checkpoint

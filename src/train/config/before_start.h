// What a run would be refused for once its ranks have started, as far as its file tells.
#pragma once

#include <functional>
#include <string>

#include "lockstep/train/config.h"

namespace lockstep::train {

// Of a key, and why.
using Refuse = std::function<void(const std::string& path, const std::string& what)>;

void refuse_before_start(const RunConfig& config, const Refuse& refuse);

}  // namespace lockstep::train

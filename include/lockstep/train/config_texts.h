// A configuration as names and values, for a run's log. Needs no torch.
#pragma once

#include <map>
#include <string>

#include "lockstep/train/config.h"

namespace lockstep::train {

// "training.seed" -> "3": what show_config() shows, the same keys and values.
std::map<std::string, std::string> config_texts(const RunConfig& config,
                                                const ConfigExtensions& extensions = {});

}  // namespace lockstep::train

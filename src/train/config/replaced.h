// Keys that say nothing in a run, because another one decides.
#pragma once

#include <string>

#include "lockstep/train/config.h"

namespace lockstep::train {

// What decides in the place of the key `path`; empty: nothing does.
std::string replaced_by(const RunConfig& config, const std::string& path);

// A remark for each of them that was given.
void note_replaced(RunConfig& config);

}  // namespace lockstep::train

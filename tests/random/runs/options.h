// The options of a run's Trainer.
#pragma once

#include <string>

#include "lockstep/train/trainer_options.h"
#include "random/runs/plan.h"

namespace lockstep::test::runs {

// All but what watches the run.
train::TrainerOptions options_of(const Settings& run, const std::string& folder);

}  // namespace lockstep::test::runs

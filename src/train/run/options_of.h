// A Trainer's options of a configuration.
#pragma once

#include "lockstep/comm/world.h"
#include "lockstep/train/config.h"
#include "lockstep/train/registry.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

comm::WorldOptions world_options_of(const RunConfig& config);

// Data as the configuration cuts it: max_samples, validation_fraction, validation_path.
RunData data_of(const RunConfig& config, const Registry& registry, const comm::World& world);

SampleShape shape_of(const RunData& data);

// Where checkpoints go; empty: nowhere.
std::string checkpoint_directory(const RunConfig& config);

TrainerOptions options_of(const RunConfig& config, const Registry& registry, const RunData& data,
                          const comm::World& world);

}  // namespace lockstep::train

// What has to hold for a Trainer's options.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

// Throws ConfigError for what contradicts itself, or is not to be had together.
void check_options(const TrainerOptions& options, const std::vector<Part>& parts,
                   const DataSource& data, const comm::Group& group);

// Throws ConfigError on all ranks, with the first difference, when they were given other options.
void compare_options(const TrainerOptions& options, const std::vector<Part>& parts,
                     const DataSource& data, const comm::Group& group);

// The same for what each line says.
void compare_lines(const std::vector<std::string>& lines, const comm::Group& group);

// Whether `folder` is one of the checkpoints of `directory`.
bool is_checkpoint_of(const std::string& folder, const std::string& directory);

}  // namespace lockstep::train

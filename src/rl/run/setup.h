// What ranks agree on before a run begins.
#pragma once

#include <map>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/rl/run.h"

namespace lockstep::rl {

// All ranks throw ConfigError with what the first of them has found wrong, or none does.
void agree_on(const comm::Group& group, const std::string& problem);

// Throws ConfigError on all ranks when options differ, with the first that does.
void check_alike(const comm::Group& group, const std::map<std::string, std::string>& mine);

// model_folder() on each rank; empty for no model. Throws ConfigError on all ranks.
std::string find_model(const comm::Group& group, const std::string& model);

// Makes output_dir, or finds the run in it that is to go on. A directory has one run; its options
// are in run.txt. Throws ConfigError on all ranks.
void prepare_directory(const comm::Group& group, const RunOptions& options);

// The file appears as a whole or not at all.
void write_whole(const std::string& folder, const std::string& name, const std::string& text);

}  // namespace lockstep::rl

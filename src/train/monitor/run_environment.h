// On what a run computes, for its report.
#pragma once

#include <map>
#include <string>

#include "lockstep/comm/world.h"

namespace lockstep::train {

// This process's host.
std::string host_name();

// Versions, processor, threads, transport; of this rank.
std::map<std::string, std::string> run_environment(const comm::World& world);

}  // namespace lockstep::train

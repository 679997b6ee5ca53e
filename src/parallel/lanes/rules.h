// What has to hold for a Ddp with lanes.
#pragma once

#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/ddp.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {

// Throws ConfigError for options that do not go with lanes, or a number of lanes that the group's
// ranks cannot run.
void check_lane_options(const DdpOptions& options, const Group& group);

// What of the model is no function of lanes, as an error's text; empty when nothing is.
std::string unfit_for_lanes(const Model& model, const DdpOptions& options, const ModuleRef& module);

// Sets the number of threads; then throws ConfigError on all ranks when ranks differ in something
// that their bits depend on. Every rank calls it.
void begin_lanes(const Group& group, const DdpOptions& options);

// Throws ConfigError when the group's ranks sum up over lanes: `who` would give other bits on
// another number of ranks; `advice` says what to do instead.
void refuse_lanes(const Group& group, std::string_view who, std::string_view advice);

}  // namespace lockstep::parallel

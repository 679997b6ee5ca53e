// What has to hold for a Ddp or Fsdp with lanes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/ddp.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/reducer/objection.h"
#include "parallel/lanes/plan.h"

namespace lockstep::parallel {

// Options that lanes have to do with.
struct LaneOptions {
  std::string_view who;  // "ddp"
  int64_t lanes = 0;
  int threads = 1;
  Buffers buffers = Buffers::Broadcast;
  std::string over_ranks = {};  // the option that has averages taken over ranks, if any
};
LaneOptions lane_options(const DdpOptions& options);

// Throws ConfigError for options that do not go with lanes, or a number of lanes that the group's
// ranks cannot run.
void check_lane_options(const LaneOptions& options, const Group& group);

// Parts of the model whose results depend on more than lanes, as an error's text; empty when there
// are none.
std::string unfit_for_lanes(const Model& model, const LaneOptions& options,
                            const ModuleRef& module);

// Sets the number of threads; then throws ConfigError on all ranks when ranks differ in something
// that their bits depend on. Every rank calls it.
void begin_lanes(const Group& group, const LaneOptions& options);

// Whether TorchScript has compiled the forward() of a scripted module anew, as it does after the
// first calls: the roundings are others then.
bool is_compiled_anew(const ModuleRef& module);
void warn_of_compiled(std::string_view who);

// Errors of a loop over lanes, as objections of the pass. `own_lane` has had no backward() that
// counts.
void object_to_missing_lane(Objection& objection, const LanePlan& plan, int64_t own_lane);
// `type` is "Ddp" or "Fsdp", whose method or options the text names.
void object_unless_in_lane(Objection& objection, const LanePlan& plan, std::string_view type);
// Called as each backward() outside of hold() begins; notes the first of a lane in the plan.
void object_to_second_backward(Objection& objection, const LanePlan& plan);
void object_to_zero_grad(Objection& objection, const LanePlan& plan);
void object_to_other_threads(Objection& objection, std::string_view type, int threads);

// Throws ConfigError when the group's ranks sum up over lanes: `who` would give other bits on
// another number of ranks; `advice` says what to do instead.
void refuse_lanes(const Group& group, std::string_view who, std::string_view advice);

}  // namespace lockstep::parallel

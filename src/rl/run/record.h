// What a run measured, in the form that metrics.json is made of.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/rl/run.h"
#include "lockstep/rl/scores.h"
#include "rl/run/plan.h"
#include "rl/run/state.h"

namespace lockstep::rl {

// Mean reward of an agent whose lines are known, the same on every rank, which all call it and play
// a part of the episodes each. Warns of environments that died.
double scripted(const Course& course, const RolloutPlan& plan, const Limits& limits,
                const comm::Group& group,
                const std::function<std::vector<std::string>(const Planned&)>& lines);

// Some environments may die; where more than a fifth do, what is measured is not the agent. `why`:
// the last words of one of this rank's. Throws Error on all ranks; every rank calls it.
void check_environments(const Rollout& rollout, const std::string& why, const comm::Group& group);

// The calls that solve each task of all columns.
using GoldCalls = std::map<TaskKey, std::vector<ToolCall>>;

// Asks the domains. Throws EnvironmentError when one of them has died.
GoldCalls gold_of(const Course& course, const Curriculum& curriculum);

// The episodes of an evaluation, by their number, on every rank. Every rank calls it.
Cell cell_of(const Rollout& rollout, const comm::Group& group);

// The mean reward of what a stage plays of its own tasks, without episodes that are lost; nothing
// where it plays none of them.
std::optional<double> own_reward(const Rollout& rollout, const RolloutPlan& plan,
                                 const StagePlan& stage);

// What the log says of an iteration of this stage, counted from 0.
std::map<std::string, double> figures_of(const Rollout& rollout, const Learnt& learnt,
                                         int64_t stage);

// The same, and more, as an object of JSON with the names of docs/three_domain.md, for the log's
// line. `ranks`: how many divide the lanes.
std::string keys_of(const Rollout& rollout, const RolloutPlan& plan, const Unit& unit,
                    const RunOptions& options, const Learnt& learnt, int ranks);

// As if the course had only the stages that are over, of which there has to be one. `joint`: the
// rewards that a joint run ended with, by domain; may be empty.
RunRecord record_of(const Curriculum& curriculum, const RunOptions& options, const RunState& state,
                    const RunResult& result, const GoldCalls& gold,
                    const std::map<std::string, double>& joint = {});

// That GRPO learns next to nothing, with what could help; nothing where it does. `iterations`:
// those of the run.
std::string equal_groups_warning(const std::vector<CurvePoint>& curve, int64_t iterations);

// How many stages are over: learnt, and all domains measured after them.
size_t stages_done(const Curriculum& curriculum, const RunState& state);

}  // namespace lockstep::rl

// What ranks agree on before a run begins.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "checkpoint/format/directory/folder_lock.h"
#include "lockstep/comm/group.h"
#include "lockstep/rl/run.h"
#include "lockstep/text/tokenizer.h"
#include "rl/run/plan.h"

namespace lockstep::rl {

// The options of a run on this many ranks, with its number of lanes. Throws ConfigError for
// impossible ones.
RunOptions completed(RunOptions options, int64_t ranks);

// With the lanes of the run that rank 0 has in output_dir in place of 0, if they are enough for
// this many ranks. Every rank of the group calls it.
RunOptions with_lanes_of_run(RunOptions options, const comm::Group& group, int64_t ranks);

// What the first rank has found wrong, on all ranks, which all call it; empty for nothing. Ranks
// wait for `timeout`, without one for the group's.
std::string first_problem(const comm::Group& group, const std::string& mine,
                          std::optional<std::chrono::milliseconds> timeout = std::nullopt);

// What `step` throws on the first rank on which it fails, all ranks throw, a ConfigError as such
// and all else as an Error. Every rank calls it, and waits as in first_problem().
void agree_on(const comm::Group& group, const std::function<void()>& step,
              std::optional<std::chrono::milliseconds> timeout = std::nullopt);

// Throws ConfigError on all ranks when options differ, with the first that does.
void check_alike(const comm::Group& group, const RunOptions& mine);

// model_folder() on each rank; empty for no model. Throws ConfigError on all ranks.
std::string find_model(const comm::Group& group, const std::string& model);

// Makes output_dir, or finds the run in it that is to be resumed: where options say so, and after a
// restart by the launcher that began it. Returns whether it is to. From then on rank 0 has `lock`,
// and nothing was written before it had. Throws ConfigError on all ranks, among others when another
// process has the lock, and when the directory cannot be written to.
bool prepare_directory(const comm::Group& group, RunOptions options,
                       std::optional<checkpoint::FolderLock>& lock);

// From now on the directory has this run, whose options are in run.txt. Throws Error on all ranks
// when it cannot be written.
void claim_directory(const comm::Group& group, const RunOptions& options);

// What the joint run in options.joint_run ended with, by domain, on rank 0; empty on the others,
// and for no such run. Throws ConfigError on all ranks where there is none, or one that was
// measured otherwise.
std::map<std::string, double> joint_rewards(const comm::Group& group, const RunOptions& options);

// Whether the context holds what every task begins with, and a model with positions for that many
// tokens the context. Throws ConfigError on all ranks.
void check_lengths(const comm::Group& group, const Course& course, const Curriculum& curriculum,
                   const text::Tokenizer& tokenizer, const RunOptions& options, int64_t max_length);

}  // namespace lockstep::rl

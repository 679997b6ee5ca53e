// The files that a run writes beside its checkpoints, and the locks of their folders.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/format/directory/folder_lock.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/config.h"
#include "lockstep/train/registry.h"

namespace lockstep::train {

// Their paths; empty: none.
struct RunFiles {
  RunFiles() = default;
  // Throws ConfigError for a logging.metrics_file that is not called metrics.jsonl.
  explicit RunFiles(const LoggingConfig& logging);

  std::string log;  // the folder
  std::string result, config;
};

// What is in the folder of checkpoints before the run begins, as rank 0 finds it.
enum class Found : char { Nothing, Own, Others };

using RunLocks = std::vector<checkpoint::FolderLock>;

// Rank 0 makes the folders and locks them, and refuses those in which another run is at work; all
// ranks throw what it throws. Returns the locks, of which the other ranks have none.
RunLocks prepare_files(const RunFiles& files, const RunConfig& config, const Registry& registry,
                       Found found, const comm::World& world);

// Removes the result of an earlier run, so that there is none until this run has its own, and
// writes the configuration. A file that the run was read from stays, with its comments. For rank 0.
void replace_files(const RunFiles& files, const RunConfig& config, const Registry& registry);

// Rank 0 writes the page of the run's folder, once its log is whole. A failure is only a warning.
void write_page(const RunConfig& config, const RunFiles& files, const comm::World& world);

}  // namespace lockstep::train

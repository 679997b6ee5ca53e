// The file of a run as a launcher has read it, once: its ranks, which start later and may start
// again, read that and not a file that has changed since, or a pipe that is empty by now.
#pragma once

#include <string>
#include <vector>

#include "lockstep/train/config.h"

namespace lockstep::train {

// A value of the launcher's command line, or of what that stands for (its PET_ variables, a file of
// accelerate). It overrides the file's; one of section `launch` whose origin begins with "flag "
// overrides --set, too, and --set overrides the others.
struct LaunchFlag {
  std::string key;     // "launch.nproc_per_node"
  std::string value;   // as it was written
  std::string origin;  // "flag --nproc-per-node", "environment PET_NNODES=2"
};

// What was read, and the flags.
struct ConfigSource {
  std::string name;  // of the user's file
  std::string text;
  std::vector<LaunchFlag> flags = {};
};

// What this process's launcher has read of this file, or else the file. Once: the variable that
// says so is removed, so that programs that this one starts do not take it for theirs. Throws
// ConfigError.
ConfigSource read_source(const std::string& path);

// The variable of the processes that this one starts, by which read_source() finds it there: the
// text is kept in memory as long as this process lives, also when it becomes another program.
// Throws Error.
inline constexpr const char* kSourceVariable = "LOCKSTEP_CONFIG";
std::string keep_source(const ConfigSource& source);

// As load_config() of a path, for a file that was read. An empty pipe is refused: another process
// may have read it.
RunConfig load_config(const ConfigSource& source, const std::vector<std::string>& overrides = {},
                      const ConfigExtensions& extensions = {});

// What --set takes in the place of a flag `name` with this value: "training.epochs=3" for "epochs"
// and "3"; with VALUE where there is none. `name` is a key, the last part of some, or what other
// programs call one ("lr"). Empty when there is no such key.
std::vector<std::string> overrides_for(const std::string& name, const std::string& value);

}  // namespace lockstep::train

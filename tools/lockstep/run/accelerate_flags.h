// The flags of `accelerate launch` that `lockstep run` takes, and its configuration file.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <string>

#include "launch/job/run.h"
#include "launch/options/accelerate.h"

namespace lockstep::tool {

// What accelerate calls a flag of torchrun, "--num-processes" for "--nproc-per-node"; null:
// nothing.
const char* accelerates_name(const std::string& torchruns);

class AccelerateFlags {
 public:
  void add_to(CLI::App& command);
  // Whether the command line itself has a flag.
  using IsGiven = std::function<bool(const std::string& flag)>;
  // Once the flags are parsed: gives flags of `command` that were not given the values that follow
  // from accelerate's, and this process and the ranks accelerate's variables: those that a flag
  // gives replace the environment's, those of the file do not. Remarks go to stderr. Throws
  // ConfigError. To be called before there are threads.
  void apply(CLI::App& command, launch::Options& options, const IsGiven& is_given) const;

 private:
  // Of the file and the flags, of which `fsdp` has those of its kind.
  launch::Accelerate settings(const launch::Accelerate& fsdp) const;

  std::string file_, ip_, precision_, gpus_;
  int processes_ = 0, machines_ = 0, rank_ = -1, port_ = -1, threads_ = 0;
  bool cpu_ = false, gpu_ = false, fsdp_ = false, debug_ = false;
  bool accepted_ = false;                                // of flags that change nothing
  std::map<std::string, std::string> settings_of_fsdp_;  // empty where not given
};

}  // namespace lockstep::tool

// The flags of `accelerate launch` that `lockstep run` takes, and its configuration file.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "launch/job/run.h"
#include "launch/options/accelerate.h"

namespace lockstep::tool {

class AccelerateFlags {
 public:
  void add_to(CLI::App& command);
  // Once the flags are parsed: gives flags of `command` that were not given the values that follow
  // from accelerate's, and the ranks accelerate's variables. Remarks go to stderr. Throws
  // ConfigError.
  void apply(CLI::App& command, launch::Options& options) const;

 private:
  std::string file_, ip_, precision_, gpus_;
  int processes_ = 0, machines_ = 0, rank_ = -1, port_ = -1, threads_ = 0;
  bool cpu_ = false, gpu_ = false, fsdp_ = false, same_network_ = false;
};

}  // namespace lockstep::tool

// `lockstep sweep`: a run for each combination of values, as many at a time as this host's cores
// allow.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/train/config.h"
#include "lockstep/train/config_source.h"
#include "training/sweep_runs.h"

namespace lockstep::tool {

class SweepCommand {
 public:
  // Adds the command to `program`.
  explicit SweepCommand(CLI::App& program);

  // Once the flags are parsed: checks the file with every combination, then runs them; returns the
  // exit status.
  int carry_out();

 private:
  // The overrides of each run.
  std::vector<std::vector<std::string>> combinations() const;
  std::vector<SweepRun> plan();
  void refuse_shared_places(const train::RunConfig& config);
  void refuse_same_run(const train::RunConfig& config, const std::vector<std::string>& chosen);
  int report(const std::vector<SweepRun>& runs) const;

  CLI::App& command_;
  std::string file_, out_ = "sweep", metric_ = "loss", mode_ = "auto";
  train::ConfigSource source_;
  std::vector<std::string> axes_, overrides_;
  std::set<std::string> places_;  // what is not below a run's folder, with its key
  std::map<std::map<std::string, std::string>, std::string>
      trained_;  // values, and what was chosen
  int jobs_ = 0, ranks_ = 1;
};

}  // namespace lockstep::tool

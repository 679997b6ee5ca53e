// `lockstep train`: a run that a file describes, with ranks that it starts itself.
#pragma once

#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "lockstep/train/config.h"
#include "lockstep/train/config_source.h"
#include "run/run.h"

namespace lockstep::tool {

// Throws ConfigError where a --set of launch.threads_per_rank and the environment's OMP_NUM_THREADS
// differ; the file's number is then not used, and stderr says so.
void compare_threads(const train::RunConfig& config);

class TrainCommand {
 public:
  // Adds the command to `program`.
  explicit TrainCommand(CLI::App& program);

  // Takes the file out of `words`, what follows `lockstep train`; the rest are flags, for the
  // parser. Throws ConfigError for an unknown flag and for a second file.
  std::vector<std::string> take_file(const std::vector<std::string>& words);
  // Once the flags are parsed: checks the file, then starts the ranks; returns the exit status.
  int carry_out();

 private:
  // Of a file that names a program of its own: `three_domain`, beside this one; else empty.
  std::vector<std::string> own_program();
  // The section launch of such a file, which is checked as that of any run.
  void apply_own_launch(const YAML::Node& root);
  // What the command line says of section `launch`.
  std::vector<train::LaunchFlag> launch_flags() const;
  void apply_launch_section(const train::RunConfig& config);
  // The ranks' command: the program `lockstep-trainer`, which is beside this one.
  std::vector<std::string> trainer();
  // Inside a launcher this process becomes the rank itself.
  [[noreturn]] void become_rank();

  RunCommand run_;
  std::string file_;
  train::ConfigSource source_;
  std::vector<std::string> overrides_;
};

}  // namespace lockstep::tool

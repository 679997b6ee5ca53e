// `lockstep bench`: measures this machine for `lockstep plan --machine`.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "run/run.h"

namespace lockstep::tool {

class BenchCommand {
 public:
  // Adds the command to `program`.
  explicit BenchCommand(CLI::App& program);

  // Counts the flags of `words`, what follows `lockstep bench`. Throws ConfigError for anything
  // else.
  void check_words(const std::vector<std::string>& words);
  // Once the flags are parsed: starts the ranks; returns the exit status.
  int carry_out();

 private:
  RunCommand run_;
  std::string to_;
};

}  // namespace lockstep::tool

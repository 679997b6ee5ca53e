// `lockstep bench`: measures this machine for `lockstep plan --machine`, or communication against
// Gloo's.
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

  // Takes all_reduce or ddp out of `words`, what follows `lockstep bench`; the rest are flags, for
  // the parser. Throws ConfigError for anything else.
  std::vector<std::string> take_what(const std::vector<std::string>& words);
  // Once the flags are parsed: starts the ranks; returns the exit status.
  int carry_out();

 private:
  RunCommand run_;
  std::string what_, to_;
};

}  // namespace lockstep::tool

// `lockstep run`: its flags. What they do is lockstep/launch/run.h.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "lockstep/launch/run.h"

namespace lockstep::tool {

class RunCommand {
 public:
  // Adds the command to `program`.
  explicit RunCommand(CLI::App& program);

  // Cuts `words`, what follows `lockstep run`, where the flags end: the program and its arguments
  // are kept, the flags returned, for the parser. Throws ConfigError for an unknown flag.
  std::vector<std::string> take_program(const std::vector<std::string>& words);

  // Once the flags are parsed; returns the exit status.
  int carry_out();

 private:
  CLI::App& command_;
  launch::Options options_;
  std::string ranks_ = "1";
  int port_ = 0;
  double grace_ = -1;
  bool dry_run_ = false, print_env_ = false, ignored_ = false;
};

}  // namespace lockstep::tool

// `lockstep top`: a run's figures while it runs.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep::tool {

class TopCommand {
 public:
  // Adds the command to `program`.
  explicit TopCommand(CLI::App& program);
  // Once the flags are parsed; returns the exit status.
  int carry_out() const;

 private:
  std::string run_;
  double every_ = 1;
  bool once_ = false;
};

}  // namespace lockstep::tool

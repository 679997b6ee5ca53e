// `lockstep report`: a page of a run.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep::tool {

class ReportCommand {
 public:
  // Adds the command to `program`.
  explicit ReportCommand(CLI::App& program);
  // Once the flags are parsed; returns the exit status.
  int carry_out() const;

 private:
  std::string run_, output_;
  std::vector<std::string> others_;
};

}  // namespace lockstep::tool

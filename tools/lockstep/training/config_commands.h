// `lockstep config show`, `check`, `init` and `reference`.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep::tool {

class ConfigCommands {
 public:
  // Adds the command to `program`.
  explicit ConfigCommands(CLI::App& program);

  // Whether the word after `config` is one of its commands. Throws ConfigError when it is not.
  static void check_words(const std::vector<std::string>& words);
  // Once the flags are parsed; returns the exit status. Throws ConfigError for a wrong file.
  int carry_out();

 private:
  int check();
  int init();

  CLI::App& command_;
  std::vector<std::string> files_, overrides_;
  std::string file_, new_file_ = "run.yaml";
  bool force_ = false;
};

}  // namespace lockstep::tool

// `lockstep inspect`, `verify`, `merge`, `export` and `diff`: their flags. What they do is
// checkpoints/commands.h.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "checkpoints/commands.h"

namespace lockstep::tool {

class CheckpointFlags {
 public:
  // Adds the commands to `program`.
  explicit CheckpointFlags(CLI::App& program);

  // Whether `word` is one of the commands.
  static bool is_command(const std::string& word);
  // Once the flags are parsed: carries out the command that was given, and returns the exit status.
  int carry_out();

 private:
  CLI::App& add(const char* name, const char* description, const char* footer);
  void add_output(CLI::App& command, const char* type, const char* description);

  CLI::App& program_;
  Inspection inspection_;
  std::string path_;
  Output output_;
  std::string max_shard_size_;
  Comparison comparison_;
};

}  // namespace lockstep::tool

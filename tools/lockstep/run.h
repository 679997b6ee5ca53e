// `lockstep run`: its flags. What they do is lockstep/launch/run.h.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "accelerate_flags.h"
#include "lockstep/launch/run.h"
#include "rendezvous_flags.h"

namespace lockstep::tool {

class RunCommand {
 public:
  // Adds the command to `program`.
  explicit RunCommand(CLI::App& program);

  // Cuts `words`, what follows `lockstep run`, where the flags end: the program and its arguments
  // are kept, the flags returned, for the parser. Throws ConfigError for an unknown flag.
  std::vector<std::string> take_program(const std::vector<std::string>& words);

  // Whether `word` is one of its flags.
  bool knows(const std::string& word) const;
  // Once the flags are parsed; returns the exit status.
  int carry_out();

 private:
  void add_job_flags();
  void add_output_flags();
  void add_accepted_flags();
  // Whether the command line has it, in either spelling: then it goes before variables.
  bool is_given(const char* flag) const { return given_.contains(command_.get_option(flag)); }
  void choose_grace();
  void choose_binding();
  template <class Value>
  CLI::Option* option(const std::string& name, Value& value, const char* type,
                      const char* description);
  void flag(const std::string& name, bool& value, const char* description);

  CLI::App& command_;
  launch::Options options_;
  RendezvousFlags rendezvous_;
  AccelerateFlags accelerate_;
  std::string bind_, numa_, allocator_ = "system";
  std::string ranks_ = "1", redirects_ = "0", tee_ = "0", shown_;
  int port_ = 0;
  double grace_ = -1, shutdown_ = -1, accepted_number_ = 0;
  std::map<const CLI::Option*, int> given_;  // on the command line, and how often
  bool dry_run_ = false, print_env_ = false, accepted_ = false;
};

}  // namespace lockstep::tool

// `lockstep run`: its flags. What they do is launch/job/run.h.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "launch/job/run.h"
#include "run/accelerate_flags.h"
#include "run/rendezvous_flags.h"

namespace lockstep::tool {

// How a command that starts ranks presents itself.
struct CommandText {
  std::string name, description, usage, footer;
};

class RunCommand {
 public:
  // Adds the command to `program`.
  explicit RunCommand(CLI::App& program);
  // The same flags, for another command that starts ranks.
  RunCommand(CLI::App& program, const CommandText& text);

  // Cuts `words`, what follows `lockstep run`, where the flags end: the program and its arguments
  // are kept, the flags returned, for the parser. Throws ConfigError for an unknown flag.
  std::vector<std::string> take_program(const std::vector<std::string>& words);

  // The option of a flag that the command line has, counted; `value_follows`: the next word is its
  // value. Throws ConfigError for an unknown flag. `next`: the word after it, if any.
  const CLI::Option* take_flag(const std::string& word, const std::string& next,
                               bool& value_follows);
  // Whether `word` is one of its flags.
  bool knows(const std::string& word) const;
  CLI::App& app() { return command_; }
  // Once the flags are parsed: takes what --config_file and accelerate's flags say, and sets the
  // variables that follow, here and for the ranks.
  void apply_accelerate();
  // A flag's value where neither command line, variable nor accelerate's file has one.
  void give(const std::string& flag, const std::string& value);
  // A flag's value where the command line has none: also in the place of a variable's.
  void replace(const std::string& flag, const std::string& value);
  // Whether the command line says it, by this flag or by accelerate's for the same.
  bool is_said(const std::string& flag) const { return !said_by(flag).empty(); }
  // The value that counts, as it was written; empty when there is none.
  std::string value_of(const std::string& flag) const;
  // From where that is: "flag --nnodes", "environment PET_NNODES=2", "accelerate".
  std::string origin_of(const std::string& flag) const;
  // The flags of the command line, for a message.
  std::vector<std::string> given_flags() const;
  // A variable of the ranks, where the environment has none of that name.
  void add_variable(const std::string& name, const std::string& value) {
    options_.environment.emplace(name, value);
  }
  // The program and its arguments.
  void start_program(std::vector<std::string> command) { options_.command = std::move(command); }
  // Whether ranks are started, as neither --dry-run nor --print-env was given.
  bool starts_ranks() const { return !dry_run_ && !print_env_; }
  // Once the flags are parsed; returns the exit status.
  int carry_out();

 private:
  void add_job_flags();
  void add_output_flags();
  void add_accepted_flags();
  // Whether the command line has it, in either spelling: then it overrides variables.
  bool is_given(const char* flag) const { return given_.contains(command_.get_option(flag)); }
  // The flag of the command line that says what `flag` does; empty: there is none.
  std::string said_by(const std::string& flag) const;
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
  std::string ranks_ = "1", redirects_ = "0", tee_ = "0", shown_, out_filters_, err_filters_;
  int port_ = 0;
  double grace_ = -1, shutdown_ = -1, accepted_number_ = 0;
  std::map<const CLI::Option*, int> given_;  // on the command line, and how often
  bool dry_run_ = false, print_env_ = false, accepted_ = false, is_accelerate_applied_ = false;
};

}  // namespace lockstep::tool

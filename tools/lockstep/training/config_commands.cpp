#include "training/config_commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/files/whole_file.h"
#include "core/nearest.h"
#include "lockstep/core/error.h"
#include "lockstep/train/config.h"

namespace lockstep::tool {
namespace {

constexpr const char* kConfigFooter =
    R"(FILE describes a run, as `lockstep train` takes it; docs/configuration.md has all keys.

  lockstep config init run.yaml
  lockstep config check run.yaml
  lockstep config show run.yaml --set training.seed=3
)";
constexpr const char* kCheckConfigFooter =
    R"(Exit status: 0 when all files are right; 2 when any is not.
)";

}  // namespace

ConfigCommands::ConfigCommands(CLI::App& program)
    : command_(*program.add_subcommand("config", "Check, show or begin the file of a run")) {
  command_.require_subcommand(1);
  command_.footer(kConfigFooter);
  const auto add_set = [this](CLI::App& command) {
    command.add_option("--set", overrides_, "Replaces a value of the file; the last one counts")
        ->type_name("KEY=VALUE")
        ->expected(1)
        ->take_all();
  };
  auto& show = *command_.add_subcommand("show", "Show every value, and where it came from");
  show.add_option("FILE", file_, "The file of a run")->required();
  add_set(show);
  auto& check = *command_.add_subcommand("check", "Tell everything that is wrong with files");
  check.footer(kCheckConfigFooter);
  check.add_option("FILE", files_, "Files of runs")->required();
  add_set(check);
  auto& init = *command_.add_subcommand("init", "Write a commented file to start from");
  init.add_option("FILE", new_file_, "The file to write (run.yaml); -: to stdout");
  init.add_flag("--force", force_, "Replace what is there");
  command_.add_subcommand("reference", "Print the page docs/configuration.md");
}

void ConfigCommands::check_words(const std::vector<std::string>& words) {
  const std::vector<std::string> known = {"show", "check", "init", "reference"};
  if (words.size() < 2) {
    throw ConfigError("[config] say what to do: show, check, init (lockstep config --help)");
  }
  const std::string& word = words[1];
  if (word.starts_with('-') || std::find(known.begin(), known.end(), word) != known.end()) return;
  throw ConfigError(fmt::format("[config] unknown command '{}'{} (lockstep config --help)", word,
                                hint_of(word, known)));
}

int ConfigCommands::carry_out() {
  if (command_.got_subcommand("check")) return check();
  if (command_.got_subcommand("init")) return init();
  if (command_.got_subcommand("reference")) {
    fmt::print("{}", train::config_reference());
    return 0;
  }
  const train::RunConfig config = train::load_config(file_, overrides_);
  fmt::print("{}", train::show_config(config));
  for (const std::string& remark : config.remarks) fmt::print(stderr, "lockstep: {}\n", remark);
  return 0;
}

int ConfigCommands::check() {
  std::string wrong;
  for (const std::string& file : files_) {
    try {
      const train::RunConfig config = train::load_config(file, overrides_);
      for (const auto& remark : config.remarks) fmt::print(stderr, "lockstep: {}\n", remark);
      fmt::print("{}: correct\n", file);
    } catch (const ConfigError& error) {
      wrong += (wrong.empty() ? "" : "\n") + std::string(error.what());
    }
  }
  if (!wrong.empty()) throw ConfigError(wrong);
  return 0;
}

int ConfigCommands::init() {
  const std::string text = train::starter_config();
  if (new_file_ == "-") {
    fmt::print("{}", text);
    return 0;
  }
  std::error_code none;
  if (std::filesystem::is_directory(new_file_, none)) {
    throw ConfigError(fmt::format("[config] init: {}: a folder: name a file in it", new_file_));
  }
  const int error = force_ ? write_whole_file(new_file_, text) : write_new_file(new_file_, text);
  if (error == EEXIST && !force_) {
    throw ConfigError(
        fmt::format("[config] init: {} is there already; --force replaces it", new_file_));
  }
  if (error != 0) {
    throw Error(
        fmt::format("[config] init: {}: {}; name another file", new_file_, std::strerror(error)));
  }
  fmt::print("wrote {}; train with: lockstep train {}\n", new_file_, new_file_);
  return 0;
}

}  // namespace lockstep::tool

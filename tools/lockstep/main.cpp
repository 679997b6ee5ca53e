// The program `lockstep`: argument parsing, and errors made into exit statuses.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoints/checkpoint_flags.h"
#include "core/nearest.h"
#include "core/process/standard_streams.h"
#include "doctor.h"
#include "flags.h"
#include "lockstep/checkpoint/error.h"
#include "planning/bench.h"
#include "planning/plan.h"
#include "reports/report.h"
#include "reports/top.h"
#include "run/run.h"
#include "tokenize.h"
#include "training/config_commands.h"
#include "training/sweep.h"
#include "training/train.h"

namespace {

using namespace lockstep;

constexpr int kWrongUsage = 2;

int complain(const std::string& what, int exit_code) {
  std::fputs(fmt::format("lockstep: {}\n", what).c_str(), stderr);  // print() may throw
  return exit_code;
}

// " (from PET_NPROC_PER_NODE)" when the flag that `what` names first was given by its variable.
std::string source_of(const std::string& what, const std::vector<std::string>& words) {
  const size_t begin = what.find("--");
  if (begin == what.npos) return "";
  const std::string flag = what.substr(begin, what.find_first_of(" :='", begin) - begin);
  const std::string variable = tool::variable_of(flag);
  if (std::getenv(variable.c_str()) == nullptr || what.find(variable) != what.npos) return "";
  for (std::string word : words) {
    if (word == "--") break;
    std::replace(word.begin(), word.end(), '_', '-');
    if (word == flag || word.starts_with(flag + "=")) return "";
  }
  return fmt::format(" (from {})", variable);
}

// CLI11 lists words that it did not expect in reverse order. An unknown flag stays behind its
// value, since explained() adds what was meant.
std::string said_of_words(const CLI::App& program, const CLI::ParseError& error) {
  const auto words = program.remaining(/*recurse=*/true);
  const bool is_list = words.size() > 1 &&
                       dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr &&
                       std::ranges::none_of(words, [](const auto& word) { return word[0] == '-'; });
  return is_list
             ? fmt::format("The following arguments were not expected: {}", fmt::join(words, " "))
             : error.what();
}

// `what` CLI11 has said of the words, with what was meant by a flag that is unknown, and where to
// read on.
std::string explained(const CLI::App& program, std::string what,
                      const std::vector<std::string>& words) {
  const CLI::App* command = &program;
  std::string line = "lockstep";
  size_t parts = 0;
  for (; parts < words.size(); ++parts) {
    const auto named = command->get_subcommands(
        [&](const CLI::App* one) { return one->get_name() == words[parts]; });
    if (named.empty()) break;
    command = named.front();
    line += " " + words[parts];
  }
  const auto unknown = tool::about_unknown_flag(
      *command, {words.begin() + static_cast<std::ptrdiff_t>(parts), words.end()});
  const std::string flag = unknown.substr(0, unknown.find_first_of(":; "));
  if (!unknown.empty()) {
    const bool is_named = what.find(flag) != what.npos;
    what += is_named ? unknown.substr(flag.size()) : "; unknown flag " + unknown;
  }
  return what.find("--help") != what.npos ? what : fmt::format("{} ({} --help)", what, line);
}

// Words that are no commands here but have a meaning elsewhere, and what to write for them; "" for
// others. `rest`: what follows the word.
std::string meant_by(const std::string& word, const std::vector<std::string>& rest) {
  if (word == "launch" || word == "start") {
    return fmt::format("; what starts ranks is run; write: lockstep run {}",
                       rest.empty() ? "PROGRAM" : fmt::format("{}", fmt::join(rest, " ")));
  }
  if (word == "version") return "; write: lockstep --version";
  if (word == "checkpoint" || word == "checkpoints") {
    return "; of checkpoints there are inspect, verify, merge, export and diff (lockstep --help)";
  }
  return "";
}

// The first word is not a command: what was meant? `asks_help`: it followed the word help.
[[noreturn]] void refuse_command(const tool::RunCommand& command,
                                 const std::vector<std::string>& words, bool asks_help) {
  const std::string& first = words.front();
  const std::string line = fmt::format("lockstep run {}", fmt::join(words, " "));
  const std::string meant = meant_by(first, {words.begin() + 1, words.end()});
  if (!meant.empty()) {
    throw ConfigError(fmt::format("unknown command '{}'{}", first, meant));
  }
  if (first.starts_with('-') && command.knows(first)) {
    throw ConfigError(fmt::format("{} is a flag of the command run; write: {}", first, line));
  }
  if (first.starts_with('-')) {
    throw ConfigError(fmt::format("unknown flag {} (lockstep --help, lockstep run --help)", first));
  }
  if (first.find('/') != first.npos && !asks_help) {
    throw ConfigError(fmt::format("'{}' is not a command; to start it, write: {}", first, line));
  }
  const std::string hint = hint_of(
      first, {"run", "train", "sweep", "tokenize", "config", "doctor", "help", "inspect", "verify",
              "merge", "export", "diff", "report", "top", "plan", "simulate", "bench"});
  if (asks_help) {
    throw ConfigError(fmt::format("unknown command '{}'{} (lockstep --help)", first, hint));
  }
  throw ConfigError(
      fmt::format("unknown command '{}'{}; to start a program, write: {}", first, hint, line));
}

// The status that says that something went wrong: diff's 1 means that there are differences.
int failure_of(const std::string& command) { return command == "diff" ? 2 : 1; }

int complain_of_output(const std::string& command, int error, int exit_code) {
  return complain(fmt::format("[{}] stdout cannot be written: {}: make room, or redirect it to "
                              "another place",
                              command.empty() || command.starts_with('-') ? "help" : command,
                              std::strerror(error)),
                  exit_code);
}

// What was printed may still be on its way: on a full disk it is lost only now.
bool is_printed() { return std::fflush(stdout) == 0 && std::ferror(stdout) == 0; }

// What `train` and `sweep` have done is in their files.
int with_output(const std::string& command, int exit_code) {
  if (command == "train" || command == "sweep" || is_printed()) return exit_code;
  return complain_of_output(command, errno, exit_code == 0 ? failure_of(command) : exit_code);
}

int run(std::vector<std::string> words) {
  CLI::App program("Data-parallel training of libtorch models from C++.", "lockstep");
  program.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION, "Print the version and exit");
  program.set_help_flag("-h,--help", "Print this help and exit");
  program.footer("lockstep run --help says more.");
  tool::RunCommand command(program);
  tool::TrainCommand train(program);
  tool::SweepCommand sweep(program);
  tool::TokenizeCommand tokenize(program);
  tool::ConfigCommands config(program);
  tool::add_doctor(program);
  tool::CheckpointFlags checkpoints(program);
  tool::ReportCommand report(program);
  tool::TopCommand top(program);
  tool::PlanCommand plan(program);
  tool::BenchCommand bench(program);
  tool::SimulateCommand simulate(program);
  if (words.empty()) words = {"--help"};
  const bool asks_help = words.front() == "help";
  if (asks_help) {
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  if (words.front() == "run") {
    const auto flags = command.take_program({words.begin() + 1, words.end()});
    words.assign({"run"});
    words.insert(words.end(), flags.begin(), flags.end());
  } else if (words.front() == "train") {
    const auto flags = train.take_file({words.begin() + 1, words.end()});
    words.assign({"train"});
    words.insert(words.end(), flags.begin(), flags.end());
  } else if (words.front() == "bench") {
    const auto flags = bench.take_what({words.begin() + 1, words.end()});
    words.assign({"bench"});
    words.insert(words.end(), flags.begin(), flags.end());
  } else if (words.front() != "doctor" && words.front() != "report" && words.front() != "top" &&
             words.front() != "plan" && words.front() != "simulate" && words.front() != "config" &&
             words.front() != "sweep" && words.front() != "tokenize" &&
             !tool::CheckpointFlags::is_command(words.front()) && words.front() != "-h" &&
             words.front() != "--help" && words.front() != "--version") {
    refuse_command(command, words, asks_help);
  }
  if (words.front() == "config") tool::ConfigCommands::check_words(words);
  // CLI11 takes the next word for the value of "--name=", even when it is another flag.
  for (const std::string& word : words) {
    if (!word.starts_with("--") || word.find('=') != word.size() - 1) continue;
    throw ConfigError(fmt::format("{} has no value: give one, or leave it out (lockstep {} --help)",
                                  word, words.front()));
  }
  const std::vector<std::string> given = words;
  std::reverse(words.begin(), words.end());  // as CLI11 wants them
  try {
    program.parse(words);
  } catch (const CLI::Success& asked) {  // --help, --version
    const int exit_code = program.exit(asked);
    if (!is_printed()) throw std::system_error(errno, std::generic_category());
    return exit_code;
  } catch (const CLI::ParseError& error) {
    const std::string what = said_of_words(program, error);
    return complain(explained(program, what + source_of(what, given), given), kWrongUsage);
  }
  if (program.got_subcommand("doctor")) return tool::examine();
  if (program.got_subcommand("run")) return command.carry_out();
  if (program.got_subcommand("report")) return report.carry_out();
  if (program.got_subcommand("top")) return top.carry_out();
  if (program.got_subcommand("plan")) return plan.carry_out();
  if (program.got_subcommand("bench")) return bench.carry_out();
  if (program.got_subcommand("simulate")) return simulate.carry_out();
  if (program.got_subcommand("train")) return train.carry_out();
  if (program.got_subcommand("sweep")) return sweep.carry_out();
  if (program.got_subcommand("tokenize")) return tokenize.carry_out();
  if (program.got_subcommand("config")) return config.carry_out();
  try {
    return checkpoints.carry_out();
  } catch (const CheckpointError& error) {
    return complain(error.what(), failure_of(given.front()));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  open_standard_streams();
  const std::string command = argc > 1 ? argv[1] : "";
  // A write beyond RLIMIT_FSIZE is an error that names the file. The launcher sees to it itself: it
  // gives ranks what it has found.
  if (command != "run" && command != "train" && command != "bench") std::signal(SIGXFSZ, SIG_IGN);
  return with_output(command, run({argv + 1, argv + argc}));
} catch (const launch::StartError& error) {
  return complain(error.what(), error.exit_code());
} catch (const ConfigError& error) {
  return complain(error.what() + source_of(error.what(), {argv + 1, argv + argc}), kWrongUsage);
} catch (const std::system_error& error) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (std::ferror(stdout) == 0) return complain(error.what(), failure_of(command));
  // Of a text that is longer than stdout's buffer.
  return complain_of_output(command, error.code().value(), failure_of(command));
} catch (const std::exception& error) {
  return complain(error.what(), failure_of(argc > 1 ? argv[1] : ""));
}

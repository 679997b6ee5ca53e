#include "run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cctype>
#include <cstdio>
#include <memory>

#include "nearest.h"

namespace lockstep::tool {
namespace {

constexpr const char* kFooter =
    R"(The ranks find torchrun's variables in their environment. Their output lines are tagged by rank; the first
failure ends the job and is reported; nothing is left behind. Flags of torchrun are taken in both spellings
(--nproc_per_node) and from PET_... variables.

Exit status: 0; the first failing rank's own; 128 + the signal that killed it, or stopped the job;
127 and 126 when the program is not there or cannot be executed; 2 for a wrong flag.

  lockstep run --nproc-per-node 4 ./mnist --epochs 2
)";

// Flags of torchrun of which this program can do only the values named here, and says so.
struct Limited {
  std::string name;
  std::vector<std::string> values;
  const char* reason;
};

const std::vector<Limited>& limited_flags() {
  static const std::vector<Limited> flags = {
      {"--nnodes", {"1", "1:1"}, "ranks run on one host"},
      {"--node-rank", {"0"}, "ranks run on one host"},
      {"--master-addr", {"127.0.0.1", "localhost"}, "ranks run on one host, over its loopback"},
      {"--rdzv-backend", {"static", "c10d"}, "ranks run on one host and need no rendezvous"},
      {"--rdzv-endpoint", {}, "ranks run on one host and need no rendezvous; see --master-port"},
      {"--rdzv-conf", {}, "ranks run on one host and need no rendezvous"},
      {"--max-restarts", {"0"}, "a job is not restarted"},
      {"--redirects", {"0"}, "output is not written to files; use the shell's > and tee"},
      {"--tee", {"0"}, "output is not written to files; use the shell's > and tee"},
      {"--log-dir", {}, "output is not written to files; use the shell's > and tee"},
  };
  return flags;
}

// torchrun's flags come with dashes and with underscores.
std::string both_spellings(const std::string& name) {
  std::string other = name;
  std::replace(other.begin() + 2, other.end(), '-', '_');
  return other == name ? name : name + "," + other;
}

// PET_NPROC_PER_NODE for --nproc-per-node, as torchrun has it.
std::string variable_of(std::string_view name) {
  std::string variable = "PET_";
  for (const char c : name.substr(2)) {
    variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return variable;
}

class Formatter : public CLI::Formatter {
 public:
  Formatter() { column_width(28); }

 private:
  std::string make_option_name(const CLI::Option* option, bool) const override {
    return "--" + option->get_lnames().front();  // one of the spellings is enough
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string type = option->get_type_name();  // "PORT:INT in [0 - 65535]"
    return option->get_expected_max() == 0 ? "" : " " + type.substr(0, type.find(':'));
  }
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: lockstep run [FLAGS] PROGRAM [ARGS]\n";
  }
};

[[noreturn]] void refuse_flag(const CLI::App& command, const std::string& name) {
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& one : option->get_lnames()) known.push_back("--" + one);
  }
  throw ConfigError(fmt::format("[run] unknown flag {}; the nearest is {} (lockstep run --help)",
                                name, nearest(name, known)));
}

void refuse_limited(const CLI::App& command) {
  for (const Limited& flag : limited_flags()) {
    for (const std::string& value : command.get_option(flag.name)->results()) {
      const auto& values = flag.values;
      if (std::find(values.begin(), values.end(), value) != values.end()) continue;
      throw ConfigError(fmt::format(
          "[run] {} {} (or {}) is not supported: {}{}", flag.name, value, variable_of(flag.name),
          flag.reason,
          values.empty() ? "" : fmt::format(" (what works: {})", fmt::join(values, ", "))));
    }
  }
}

}  // namespace

RunCommand::RunCommand(CLI::App& program)
    : command_(*program.add_subcommand("run", "Start the ranks of a job on this host")) {
  command_.formatter(std::make_shared<Formatter>());
  command_.footer(kFooter);
  const auto option = [this](const std::string& name, auto& value, const char* type,
                             const char* description) {
    return command_.add_option(both_spellings(name), value, description)
        ->envname(variable_of(name))
        ->type_name(type);
  };
  const auto flag = [this](const std::string& name, bool& value, const char* description) {
    command_.add_flag(both_spellings(name), value, description);
  };
  option("--nproc-per-node", ranks_, "N",
         "Ranks to start (1); cpu: one per core; gpu: one per GPU;\nauto: gpu where there are any, "
         "otherwise cpu");
  option("--master-port", port_, "PORT", "Where rank 0 listens, on loopback only (a free port)")
      ->check(CLI::Range(0, 65535));
  option("--shutdown-timeout", grace_, "SECONDS", "The same as --grace")
      ->check(CLI::Range(0.0, 86400.0))
      ->group("");
  option(
      "--grace", grace_, "SECONDS",
      "From asking ranks to stop until they are killed\n(1.5 after a failure, 10 after a signal)")
      ->check(CLI::Range(0.0, 86400.0));
  option("--rdzv-id", options_.run_id, "TEXT", "Name of the job: TORCHELASTIC_RUN_ID (random)");
  option("--role", options_.role, "TEXT", "Name of the ranks' role: ROLE_NAME (default)");
  flag("--standalone", ignored_, "Accepted: one host is what there is");
  flag("--no-python", ignored_, "Accepted: the program is always run directly");
  flag("--dry-run", dry_run_, "Show what would be started, and start nothing");
  flag("--print-env", print_env_, "Show the variables of each rank, and start nothing");
  for (const Limited& limited : limited_flags()) {
    command_.add_option(both_spellings(limited.name))
        ->envname(variable_of(limited.name))
        ->group("");
  }
}

std::vector<std::string> RunCommand::take_program(const std::vector<std::string>& words) {
  auto word = words.begin();
  for (; word != words.end() && word->starts_with('-') && *word != "--"; ++word) {
    const std::string name = word->substr(0, word->find('='));
    const CLI::Option* option = command_.get_option_no_throw(name);
    if (option == nullptr) refuse_flag(command_, name);
    const bool value_follows = option->get_expected_max() > 0 && name == *word;
    if (value_follows && word + 1 != words.end()) ++word;
  }
  const auto program = word != words.end() && *word == "--" ? word + 1 : word;
  options_.command.assign(program, words.end());
  return {words.begin(), word};
}

int RunCommand::carry_out() {
  refuse_limited(command_);
  options_.ranks = launch::count_ranks(ranks_);
  if (port_ > 0) options_.master_port = static_cast<uint16_t>(port_);
  if (grace_ >= 0) {
    options_.grace = std::chrono::milliseconds(static_cast<int64_t>(grace_ * 1000));
  }
  if (print_env_) fmt::print("{}", launch::describe_environment(options_));
  if (dry_run_) fmt::print("{}\n", launch::describe(options_));
  return print_env_ || dry_run_ ? 0 : launch::run(options_);
}

}  // namespace lockstep::tool

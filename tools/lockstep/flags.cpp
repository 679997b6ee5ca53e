#include "flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "lockstep/core/error.h"
#include "lockstep/core/nearest.h"

namespace lockstep::tool {
namespace {

constexpr const char* kNoPython = "it is about Python programs";
constexpr const char* kFilter =
    "the launcher does not search output; use grep on the --log-dir files";

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

}  // namespace

std::string both_spellings(const std::string& name) {
  std::string other = name.substr(name.find("--"));
  const std::string first = other;
  std::replace(other.begin() + 2, other.end(), '-', '_');
  return other == first ? name : name + "," + other;
}

std::string variable_of(std::string_view name) {
  std::string variable = "PET_";
  for (const char c : name.substr(name.find("--") + 2)) {
    variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return variable;
}

const std::vector<Limited>& limited_flags() {
  static const std::vector<Limited> flags = {
      {"--start-method", {"spawn", "fork", "forkserver"}, "programs are always executed anew"},
      {"--event-log-handler", {"null"}, "events are not recorded; failures are reported on stderr"},
      {"-m,--module", {}, kNoPython, false},
      {"--run-path", {}, kNoPython, false},
      {"--logs-specs", {}, "it names a Python class; the files are as docs/launching.md says"},
      {"--print-completion", {}, "there is no completion script"},
      {"--duplicate-stdout-filters", {}, kFilter},
      {"--duplicate-stderr-filters", {}, kFilter},
      {"--virtual-local-rank", {}, "a program asks World::device() for its device", false},
      {"--signals-to-handle",
       {"SIGTERM,SIGINT,SIGHUP,SIGQUIT", "SIGTERM,SIGINT,SIGHUP"},
       "SIGTERM, SIGINT and SIGHUP stop the job, SIGUSR1 is passed on, SIGUSR2 and SIGQUIT ask where "
       "the ranks are"},
  };
  return flags;
}

void add_limited_flags(CLI::App& command) {
  for (const Limited& limited : limited_flags()) {
    CLI::Option* option = limited.takes_value ? command.add_option(both_spellings(limited.name))
                                              : command.add_flag(both_spellings(limited.name));
    option->envname(variable_of(limited.name))->group("");
  }
}

void refuse_limited_flags(const CLI::App& command) {
  for (const Limited& flag : limited_flags()) {
    const std::string name = flag.name.substr(flag.name.find("--"));
    for (const std::string& value : command.get_option(name)->results()) {
      const auto& values = flag.values;
      if (std::find(values.begin(), values.end(), value) != values.end()) continue;
      if (!flag.takes_value && (value == "false" || value == "0")) continue;
      throw ConfigError(fmt::format(
          "[run] {}{} (or {}) is not supported: {}{}", name, flag.takes_value ? " " + value : "",
          variable_of(name), flag.reason,
          values.empty() ? "" : fmt::format(" (what works: {})", fmt::join(values, ", "))));
    }
  }
}

const CLI::Option* option_of(const CLI::App& command, const std::string& word,
                             bool& value_follows) {
  const bool is_short = !word.starts_with("--");
  const std::string name = is_short ? word.substr(0, 2) : word.substr(0, word.find('='));
  const CLI::Option* option = command.get_option_no_throw(name);
  value_follows = option != nullptr && option->get_expected_max() > 0 && name == word;
  return option;
}

void refuse_flag(const CLI::App& command, const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& one : option->get_lnames()) known.push_back("--" + one);
  }
  throw ConfigError(fmt::format("[run] unknown flag {}; the nearest is {} (lockstep run --help)",
                                name, nearest(name, known)));
}

std::shared_ptr<CLI::FormatterBase> flag_formatter() { return std::make_shared<Formatter>(); }

}  // namespace lockstep::tool

#include "flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>

#include "core/nearest.h"
#include "core/number.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "lockstep/train/config_source.h"

namespace lockstep::tool {
namespace {

// By flags in capitals, what training operators of Kubernetes and torchrun call them, too.
constexpr std::pair<std::string_view, const char*> kOtherVariables[] = {
    {"NPROC_PER_NODE", "PET_N_PROC_PER_NODE"},
    {"SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"},
    {"LOG_LINE_PREFIX_TEMPLATE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"}};

constexpr const char* kNoPython = "it is about Python programs";
constexpr const char* kFsdpOnly =
    "models are divided by Fsdp only (docs/fsdp.md); there is no tensor, context or sequence "
    "parallelism";
constexpr const char* kNoMegatron = "Megatron is not supported";

class Formatter : public CLI::Formatter {
 public:
  explicit Formatter(std::string usage) : usage_(std::move(usage)) { column_width(28); }

 private:
  std::string make_option_name(const CLI::Option* option, bool) const override {
    const auto& letters = option->get_snames();
    return (letters.empty() ? "" : "-" + letters.front() + ", ") + "--" +
           option->get_lnames().front();  // one of the spellings is enough
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_expected_max() == 0 ? "" : " " + option->get_type_name();
  }
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    return group == kHidden ? "" : CLI::Formatter::make_group(group, is_positional, options);
  }
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: " + usage_ + "\n";
  }

  std::string usage_;
};

// Flags by which other launchers are told the same, and what to write here; {} is the value.
const std::map<std::string, std::string>& flags_of_others() {
  static const std::string ranks =
      "it is mpirun's: write --nproc-per-node {}, the ranks on this host";
  static const std::string hosts =
      "a launcher starts the ranks of its own host: run the same command on each, with --nnodes "
      "and "
      "--rdzv-endpoint (docs/launching.md, Several hosts)";
  static const std::string variable =
      "ranks get the launcher's environment: write NAME=VALUE before lockstep {1}";
  static const std::string ranks_of_host = "write --nproc-per-node {}, the ranks on this host";
  static const std::string deepspeed =
      "DeepSpeed is not supported: Fsdp and ZeroOptimizer shard what its stages shard "
      "(docs/fsdp.md)";
  static const std::string programs =
      "the program decides that: give it to its Trainer (docs/trainer.md), or to lockstep train "
      "(docs/configuration.md)";
  static const std::string needless = "it is mpirun's and not needed here: leave it out";
  static const std::map<std::string, std::string> flags = {
      {"-n", ranks},
      {"-np", ranks},
      {"--np", ranks},
      {"-c", ranks},
      {"--n", ranks},
      {"-N", ranks},
      {"-ppn", ranks},
      {"--npernode", ranks},
      {"-npernode", ranks},
      {"--ntasks", ranks},
      {"-H", hosts},
      {"--host", hosts},
      {"-host", hosts},
      {"--hosts", hosts},
      {"-hosts", hosts},
      {"-f", hosts},
      {"--hostfile", hosts},
      {"-hostfile", hosts},
      {"-x", variable},
      {"--env", variable},
      {"-env", variable},
      {"-genv", variable},
      {"--export", variable},
      {"--machinefile", hosts},
      {"-machinefile", hosts},
      {"--bind-to", "it is mpirun's: write --bind cores or --bind numa"},
      {"--oversubscribe", needless},
      {"--allow-run-as-root", needless},
      {"--tag-output", needless},
      {"-l", needless},
      {"--mca", needless},
      {"-mca", needless},
      {"--gpus", ranks_of_host},
      {"--num-gpus", ranks_of_host},
      {"--num_gpus", ranks_of_host},
      {"--use_deepspeed", deepspeed},
      {"--deepspeed", deepspeed},
      {"--zero_stage", deepspeed},
      {"--gradient_accumulation_steps", programs},
      {"--gradient_clipping",
       "the program decides that: it is max_grad_norm of its Trainer (docs/trainer.md), or "
       "training.max_grad_norm of lockstep train (docs/configuration.md)"},
      {"--enable_cpu_affinity", "write --bind numa"},
  };
  return flags;
}

// The same of flags that begin alike, in accelerate's spelling; "" for others.
std::string about_family(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  static constexpr std::pair<const char*, const char*> kFamilies[] = {
      {"__fp8_", "fp8 is not supported: --mixed_precision takes no, fp16 and bf16"},
      {"__dynamo_", kNoPython},
      {"__parallelism_config_", kFsdpOnly},
      {"__use_parallelism_config", kFsdpOnly},
      {"__deepspeed_",
       "DeepSpeed is not supported: Fsdp and ZeroOptimizer shard what its stages "
       "shard (docs/fsdp.md)"},
      {"__megatron_lm_", kNoMegatron},
      {"__use_megatron_lm", kNoMegatron},
      {"__mpirun_hostfile",
       "mpirun PROGRAM starts a program without a launcher (docs/launching.md, Started by others)"},
      {"__tpu", "TPUs are not supported"},
  };
  for (const auto& [family, reason] : kFamilies) {
    if (name.starts_with(family)) return reason;
  }
  return "";
}

CLI::Validator validator(std::function<bool(const std::string&)> is_good, const std::string& what) {
  return CLI::Validator(
      [is_good = std::move(is_good), what](std::string& text) {
        return is_good(text) ? std::string() : fmt::format("'{}': give {}", text, what);
      },
      "");
}

std::optional<double> number_of(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') return std::nullopt;
  return value;
}

// What was meant by the flag of `word`, which `command` does not know: how to set a key of its
// file, or the nearest flag; "" for neither. `next`: the word after it, if any.
std::string meant_by(const CLI::App& command, const std::string& word, const std::string& next) {
  if (!word.starts_with("--")) return "";
  const size_t equals = word.find('=');
  const std::string name = word.substr(2, equals - std::min<size_t>(equals, 2));
  if (command.get_option_no_throw("--set") != nullptr) {
    std::string key = name;
    std::replace(key.begin(), key.end(), '-', '_');
    const bool is_value = !next.starts_with('-') || number_of(next);
    const auto overrides = train::overrides_for(key, equals != word.npos ? word.substr(equals + 1)
                                                     : is_value          ? next
                                                                         : "");
    if (!overrides.empty()) {
      return fmt::format(": write --set {}", fmt::join(overrides, " or --set "));
    }
  }
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const auto& one : option->get_lnames()) known.push_back(one);
  }
  return hint_of(name, known, "; the nearest is --");
}

}  // namespace

CLI::Validator whole_number(int least, int most) {
  const auto is_good = [least, most](const std::string& text) {
    const auto value = whole_number_from<int>(text);
    return value && *value >= least && *value <= most;
  };
  return validator(is_good, fmt::format("a whole number from {} to {}", least, most));
}

CLI::Validator not_negative() {
  const auto is_good = [](const std::string& text) {
    const auto value = number_of(text);
    return value && *value >= 0 && std::isfinite(*value);
  };
  return validator(is_good, "a number, 0 or more");
}

CLI::Validator seconds(double most) {
  const auto is_good = [most](const std::string& text) {
    const auto value = number_of(text);
    return value && *value >= 0 && *value <= most;
  };
  return validator(is_good, fmt::format("seconds, from 0 to {:g}", most));
}

CLI::Validator some_seconds(double most) {
  const auto is_good = [most](const std::string& text) {
    const auto value = number_of(text);
    return value && *value > 0 && *value <= most;
  };
  return validator(is_good, fmt::format("seconds, above 0 and at most {:g}", most));
}

CLI::Validator one_of(std::initializer_list<const char*> words) {
  const std::vector<std::string> known(words.begin(), words.end());
  const auto is_good = [known](const std::string& text) {
    return std::find(known.begin(), known.end(), text) != known.end();
  };
  return validator(is_good, fmt::format("one of {}", fmt::join(known, ", ")));
}

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
  for (const auto& [own, of_others] : kOtherVariables) {
    if (variable.substr(4) != own || env_text(variable.c_str()) || !env_text(of_others)) continue;
    return of_others;
  }
  return variable;
}

const std::vector<Limited>& limited_flags() {
  static const std::vector<Limited> flags = {
      {"--start-method",
       {"spawn", "fork", "forkserver"},
       "programs are always started as new processes"},
      {"--event-log-handler", {"null"}, "events are not recorded; failures are reported on stderr"},
      {"-m,--module", {}, kNoPython, false},
      {"--run-path", {}, kNoPython, false},
      {"--logs-specs",
       {"default"},
       "it names a Python class; the files are as docs/launching.md says"},
      {"--print-completion", {}, "there is no completion script"},
      {"--dynamo-backend", {"no", "NO"}, kNoPython},
      {"--parallelism-config-tp-size", {"1"}, kFsdpOnly},
      {"--parallelism-config-cp-size", {"1"}, kFsdpOnly},
      {"--parallelism-config-sp-size", {"1"}, kFsdpOnly},
      {"--virtual-local-rank", {}, "a program asks World::device() for its device", false},
      {"--signals-to-handle",
       {"SIGTERM,SIGINT,SIGHUP,SIGQUIT", "SIGTERM,SIGINT,SIGHUP"},
       "SIGTERM, SIGINT and SIGHUP stop the job, SIGUSR1 is passed on, SIGUSR2 and SIGQUIT ask "
       "where "
       "the ranks are"},
  };
  return flags;
}

void add_limited_flags(CLI::App& command) {
  for (const Limited& limited : limited_flags()) {
    CLI::Option* option = limited.takes_value ? command.add_option(both_spellings(limited.name))
                                              : command.add_flag(both_spellings(limited.name));
    option->envname(variable_of(limited.name))->group(kHidden);
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
          "[{}] {}{} (or {}) is not supported: {}{}", command.get_name(), name,
          flag.takes_value ? " " + value : "", variable_of(name), flag.reason,
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

void refuse_flag(const CLI::App& command, const std::string& word, const std::string& next) {
  const size_t equals = word.find('=');
  const std::string name = word.substr(0, equals);
  const auto& others = flags_of_others();
  const auto refuse_as = [&](const std::string& flag, const std::string& value) {
    const auto found = others.find(flag);
    if (found == others.end()) return;
    throw ConfigError(
        fmt::format("[{}] {}: {}", command.get_name(), flag,
                    fmt::format(fmt::runtime(found->second), value, command.get_name())));
  };
  const std::string meant = meant_by(command, word, next);
  if (const std::string reason = about_family(name); !reason.empty() && !meant.starts_with(':')) {
    throw ConfigError(fmt::format("[{}] {}: {}", command.get_name(), name, reason));
  }
  if (!meant.starts_with(':')) {
    const std::string value = equals == word.npos ? next : word.substr(equals + 1);
    refuse_as(name, number_of(value) ? value : "N");
  }
  if (!word.starts_with("--") && number_of(word.substr(2))) {
    refuse_as(word.substr(0, 2), word.substr(2));
  }
  throw ConfigError(fmt::format("[{0}] unknown flag {1}{2} (lockstep {0} --help)",
                                command.get_name(), name, meant));
}

std::string about_unknown_flag(const CLI::App& command, const std::vector<std::string>& words) {
  for (size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
    const std::string& word = words[i];
    if (word.size() < 2 || word[0] != '-' || number_of(word)) continue;
    bool value_follows = false;
    if (option_of(command, word, value_follows) == nullptr) {
      return word.substr(0, word.find('=')) +
             meant_by(command, word, i + 1 < words.size() ? words[i + 1] : "");
    }
    if (value_follows) ++i;
  }
  return "";
}

std::shared_ptr<CLI::FormatterBase> flag_formatter(const std::string& usage) {
  return std::make_shared<Formatter>(usage);
}

}  // namespace lockstep::tool

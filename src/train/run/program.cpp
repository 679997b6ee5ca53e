// A main() for programs that a configuration drives.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "comm/text.h"
#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"
#include "lockstep/train/config_source.h"
#include "lockstep/train/run.h"
#include "train/run/run_noticed.h"

namespace lockstep::train {
namespace {

constexpr std::string_view kUsage =
    "usage: {} --config FILE [--set KEY=VALUE]...\n"
    "FILE is described in docs/configuration.md; --set replaces one of its values.\n";

struct Arguments {
  std::string file;
  std::vector<std::string> overrides;
  bool asks_for_help = false;
};

Arguments arguments_of(int argc, char** argv) {
  Arguments all;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const auto value_of = [&](std::string_view flag) -> std::string {
      if (word.size() > flag.size()) return std::string(word.substr(flag.size() + 1));
      if (++i == argc) throw ConfigError(fmt::format("[run] {} needs a value", flag));
      return argv[i];
    };
    const auto is = [&](std::string_view flag) {
      return word == flag || (word.starts_with(flag) && word[flag.size()] == '=');
    };
    if (word == "--help" || word == "-h") {
      all.asks_for_help = true;
    } else if (is("--set")) {
      all.overrides.push_back(value_of("--set"));
    } else if (is("--config") || !word.starts_with("-")) {
      if (!all.file.empty()) throw ConfigError("[run] two configuration files: a run has one");
      all.file = is("--config") ? value_of("--config") : std::string(word);
    } else {
      throw ConfigError(fmt::format("[run] unknown flag {} (--help shows all)", word));
    }
  }
  if (all.file.empty() && !all.asks_for_help) {
    throw ConfigError("[run] no configuration file given: --config FILE (--help shows all)");
  }
  return all;
}

int fail(const std::string& text, int status, flight::Blame blame = flight::Blame::Own) {
  flight::report_failure(text, blame);
  const char* const rank = std::getenv("RANK");
  const std::string where = rank != nullptr ? " on rank " + std::string(rank) : "";
  std::fprintf(stderr, "error%s: %s\n", where.c_str(), text.c_str());
  return status;
}

}  // namespace

int run_program(int argc, char** argv, const Registry& registry) {
  // Not destroyed: a signal that comes while the process ends must not make a finished run one that
  // was killed.
  static auto& notice = *new std::optional<PreemptionNotice>;
  notice.reset();                            // of an earlier call
  setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // lines appear when they are complete
  try {
    const Arguments arguments = arguments_of(argc, argv);
    if (arguments.asks_for_help) {
      std::fputs(fmt::format(fmt::runtime(kUsage), argv[0]).c_str(), stdout);
      return 0;
    }
    const ConfigSource source = read_source(arguments.file);
    return run(load_config(source, arguments.overrides, registry.extensions()), registry, notice);
  } catch (const ConfigError& error) {
    return fail(error.what(), 2);
  } catch (const CommError& error) {
    return fail(error.what(), 1, flight::Blame::Peer);
  } catch (...) {
    return fail(comm::thrown_text(), 1);
  }
}

}  // namespace lockstep::train

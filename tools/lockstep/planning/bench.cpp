#include "planning/bench.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "beside.h"
#include "core/files/whole_file.h"
#include "core/nearest.h"
#include "lockstep/core/error.h"

namespace lockstep::tool {
namespace {

constexpr const char* kBenchFooter =
    R"(Measures matrix products, memory and collectives with as many ranks as are to train, all at once, in about three seconds, and
writes what lockstep plan --machine reads. With all_reduce, or ddp, it compares the time of calls, or of training steps, with that
over libtorch's Gloo, measured in turns; --to then takes JSON. The other flags are those of lockstep run. The machine should do
nothing else meanwhile.

  lockstep bench --nproc-per-node 2 --to machine.json
  lockstep bench all_reduce --nproc-per-node 2
  lockstep bench ddp --nproc-per-node 2
)";

}  // namespace

BenchCommand::BenchCommand(CLI::App& program)
    : run_(program,
           {.name = "bench",
            .description = "Measure this machine, for lockstep plan, or communication against Gloo",
            .usage = "lockstep bench [all_reduce | ddp] [--to FILE] [FLAGS]",
            .footer = kBenchFooter}) {
  run_.app()
      .add_option("--to", to_, "The file to write (it is printed)")
      ->type_name("FILE")
      ->expected(1);
}

std::vector<std::string> BenchCommand::take_what(const std::vector<std::string>& words) {
  std::vector<std::string> flags;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "all_reduce" || words[i] == "ddp") {
      if (!what_.empty()) {
        throw ConfigError(
            fmt::format("[bench] {} and {}: give one of them, and measure the other afterwards",
                        what_, words[i]));
      }
      what_ = words[i];
      continue;
    }
    if (words[i].empty() || words[i][0] != '-') {
      throw ConfigError(
          fmt::format("[bench] '{}' is not a flag, nor all_reduce or ddp{} (lockstep "
                      "bench --help)",
                      words[i], hint_of(words[i], {"all_reduce", "ddp"})));
    }
    const bool is_last = i + 1 == words.size();
    bool value_follows = false;
    run_.take_flag(words[i], is_last ? "" : words[i + 1], value_follows);
    flags.push_back(words[i]);
    if (value_follows && !is_last) flags.push_back(words[++i]);
  }
  return flags;
}

int BenchCommand::carry_out() {
  std::vector<std::string> command = {program_beside("lockstep-bench", "bench")};
  if (!what_.empty()) command.push_back("--against=" + what_);
  if (!to_.empty()) {
    // Known before anything is measured.
    std::error_code error;
    if (std::filesystem::is_directory(to_, error)) {
      throw ConfigError(fmt::format("[bench] --to {}: a folder: name a file in it", to_));
    }
    if (error && error != std::errc::no_such_file_or_directory) {
      throw ConfigError(
          fmt::format("[bench] --to {}: {}: name another file", to_, error.message()));
    }
    const auto folder = std::filesystem::absolute(to_, error).parent_path();
    if (!is_stream(to_) && access(folder.c_str(), W_OK) != 0) {
      throw ConfigError(fmt::format("[bench] --to {}: nothing can be written into {}: {}", to_,
                                    folder.string(), std::strerror(errno)));
    }
    const bool is_like_a_flag = to_.size() > 1 && to_.starts_with('-');
    command.push_back(is_like_a_flag ? "./" + to_ : to_);
  }
  run_.start_program(command);
  return run_.carry_out();
}

}  // namespace lockstep::tool

// The program `lockstep-bench`: what `lockstep bench` starts as ranks. Its argument is the file to
// write; without one it prints. Before it may be --against=all_reduce or --against=ddp, for a
// comparison with Gloo.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/whole_file.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/bench.h"
#include "plan/measure/against_gloo.h"

namespace {

using lockstep::comm::World;

// A world of the same ranks.
World over_gloo() {
  unsetenv("LOCKSTEP_BACKEND");
  return World::from_env({.backend = lockstep::comm::Backend::Gloo});
}

struct Texts {
  std::string table, json;
};

template <class Times>
Texts texts_of(const Times& times, const World& world) {
  return {lockstep::plan::text_of(times, world), lockstep::plan::json_of(times, world)};
}

Texts measured(const std::string& what, const World& world) {
  namespace plan = lockstep::plan;
  if (what.empty()) return {"", plan::machine_json(plan::measure_machine(world))};
  const World gloo = over_gloo();
  return what == "ddp" ? texts_of(plan::compare_ddp(world, gloo), world)
                       : texts_of(plan::compare_all_reduce(world, gloo), world);
}

}  // namespace

int main(int argc, char** argv) try {
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond RLIMIT_FSIZE is an error
  std::vector<std::string> words(argv + 1, argv + argc);
  constexpr std::string_view kAgainst = "--against=";
  std::string what;
  if (!words.empty() && words[0].starts_with(kAgainst)) {
    what = words[0].substr(kAgainst.size());
    words.erase(words.begin());
  }
  const bool is_flag = !words.empty() && words[0].size() > 1 && words[0].starts_with('-');
  if (is_flag || words.size() > 1 || !(what.empty() || what == "ddp" || what == "all_reduce")) {
    throw lockstep::ConfigError(
        "[bench] usage: lockstep-bench [--against=all_reduce | --against=ddp] [FILE]");
  }
  const std::string path = words.empty() ? "" : words[0];
  const auto world = World::from_env();
  const auto [table, json] = measured(what, world);
  if (!world.is_main()) return 0;
  std::fputs(table.c_str(), stdout);
  if (path.empty()) {
    if (what.empty()) std::fputs(json.c_str(), stdout);
    return 0;
  }
  if (const int error = lockstep::write_whole_file(path, json); error != 0) {
    throw lockstep::Error("[bench] " + path + ": cannot be written: " + std::strerror(error) +
                          ": name another file by --to");
  }
  if (lockstep::is_stream(path)) return 0;
  std::printf("wrote %s", path.c_str());
  if (what.empty()) std::printf("; lockstep plan run.yaml --machine %s reads it", path.c_str());
  std::puts("");
  return 0;
} catch (const lockstep::ConfigError& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}

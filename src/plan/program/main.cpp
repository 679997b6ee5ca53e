// The program `lockstep-bench`: what `lockstep bench` starts as ranks. Its argument is the file to
// write; without one it prints.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "core/files/whole_file.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/bench.h"

int main(int argc, char** argv) try {
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond RLIMIT_FSIZE is an error
  const std::string path = argc > 1 ? argv[1] : "";
  const auto world = lockstep::comm::World::from_env();
  const auto text = lockstep::plan::machine_json(lockstep::plan::measure_machine(world));
  if (!world.is_main()) return 0;
  if (path.empty()) {
    std::fputs(text.c_str(), stdout);
    return 0;
  }
  if (const int error = lockstep::write_whole_file(path, text); error != 0) {
    throw lockstep::ConfigError("[bench] " + path + ": cannot be written: " + std::strerror(error) +
                                ": name another file by --to");
  }
  if (lockstep::is_stream(path)) return 0;
  std::printf("wrote %s; lockstep plan run.yaml --machine %s reads it\n", path.c_str(),
              path.c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}

// Starts the ranks of a job on this host and stays with them to the end. What happens when is
// written in docs/launching.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/output/streams.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {

enum class Binding {
  None,   // all that the launcher may use
  Cores,  // an equal part of them for each rank, close together
  Numa,   // those of one NUMA node; ranks are spread evenly over the nodes
};

struct Options {
  // The program, looked up in PATH as execvp() does, and its arguments.
  std::vector<std::string> command;
  int ranks = 1;
  // Where rank 0 listens, on the loopback interface; a free port when not given.
  std::optional<uint16_t> master_port;
  // From asking the ranks to stop until they are killed. When not given: 1.5 s after a failure, so
  // that a job is over within 3 s of it, and 10 s after a signal to the launcher, so that a program
  // has time to save.
  std::optional<std::chrono::milliseconds> grace;
  // TORCHELASTIC_RUN_ID; a random one when empty.
  std::string run_id;
  std::string role = "default";

  // How often the ranks are started again, all of them, after one has failed.
  int max_restarts = 0;

  // Files: docs/launching.md. Without `log_dir` there are some only when `redirects`, `tee` or
  // filters ask for them, in a new folder below TMPDIR.
  std::string log_dir = {};
  StreamChoice redirects = {};  // to files only
  StreamChoice tee = {};        // to files, too
  // Lines of stdout, and of stderr, that hold one of these texts are also written to one file for
  // all ranks of this host.
  std::vector<std::string> out_filters = {}, err_filters = {};
  // The local ranks whose output is shown; all when empty. Files are written all the same.
  std::vector<int> shown_ranks = {};
  // Before each line: ${role_name}, ${local_rank}, ${rank} and ${hostname} are replaced. "[rank N]
  // " when empty.
  std::string line_prefix = {};

  // Variables for all ranks, where the caller's environment has none of that name.
  std::map<std::string, std::string> environment = {};
  // Which cores each rank may use.
  Binding binding = Binding::None;
  // A library that the ranks load before any other, ahead of what LD_PRELOAD names:
  // find_allocator()'s.
  std::string preload = {};
  // Says how the start proceeds: a line for each stage, with the seconds since the launcher's
  // start.
  bool verbose = false;
};

// The program cannot be started. exit_code() is the shell's: 127 when it is not there, 126 when it
// cannot be executed.
class StartError : public Error {
 public:
  StartError(const std::string& what, int exit_code) : Error(what), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

// How many ranks `--nproc-per-node` asks for: a number from 1 to 4096, `cpu` (the cores this
// process may use), `gpu` (the NVIDIA devices it may use), `auto` (gpu where there are any,
// otherwise cpu). Throws ConfigError.
int count_ranks(std::string_view text);

// The library of a memory allocator: `tcmalloc` or `jemalloc`, where the dynamic linker looks for
// libraries or in /usr/local/lib or CONDA_PREFIX/lib, or the path of any. Throws ConfigError that
// says what to install when it is not there, and for what LD_PRELOAD cannot name or load.
std::string find_allocator(std::string_view name);

// Runs the job, with its restarts, and returns the exit status for the launcher: 0 when every rank
// exited with 0, the first failing rank's status, or 128 + the number of the signal that ended it
// or the launcher's work. On return no descendant of this process is left, and the caller's signal
// handling is as before. Call it from the only thread of a process without children of its own.
// Throws StartError, ConfigError, Error before any rank runs.
int run(const Options& options);

// What run() would start, one line for people; and the variables that it would set, as `rank 0:
// NAME=value` lines. Both throw as run() does, and start nothing.
std::string describe(const Options& options);
std::string describe_environment(const Options& options);

}  // namespace lockstep::launch

// Real jobs: the built `lockstep` program, what it prints, how it ends, and whether anything of it
// is left.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "support/folder.h"

namespace lockstep::launch::testing {

// Long enough for any machine: reached only when something hangs.
constexpr std::chrono::seconds kPatience{60};

struct Result {
  int exit_code = -1;  // 128 + signal when the launcher itself was killed
  std::string out, err;
  double seconds = 0;  // from the start
};

struct Settings {
  std::map<std::string, std::string> environment = {};
  std::vector<int> ignored_signals = {};
  // A descriptor under this number is open in the launcher when it starts; none when negative.
  int extra_fd = -1;
  // RLIMIT_FSIZE; none when negative.
  long most_file_bytes = -1;
  // stdout is a pipe that the launcher may write to and not open, as after sudo or su.
  bool is_output_anothers = false;
  // RLIMIT_NOFILE, soft and hard; none when negative.
  long most_open_files = -1, most_open_files_ever = -1;
  // System calls that fail for the launcher and its ranks, as on an old kernel or in a sandbox.
  std::vector<int> refused_calls = {};
  int refusal = 38;  // ENOSYS
  // A child that the launcher has from the start, with this file open; none when empty.
  std::string child_holds = {};
};

// `lockstep ARGS`, running. Killed and reaped when it goes out of scope.
class Job {
 public:
  explicit Job(std::vector<std::string> args, Settings settings = {});
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  pid_t pid() const { return pid_; }
  void write_input(const std::string& text);
  void close_input();
  void stop_reading();
  // Leaves what comes on stdout in the pipe, until the job has ended.
  void leave_unread() { is_unread_ = true; }
  int unread_bytes() const;
  // Waits until `text` has come `count` times on stdout. False when the output ended without it.
  [[nodiscard]] bool await(const std::string& text, int count = 1);
  // The same on stderr, behind what was there `after` so many bytes.
  [[nodiscard]] bool await_error(const std::string& text, size_t after = 0);
  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }
  void forget_errors() { err_.clear(); }
  // Closes stdin and waits for the end.
  Result wait();

 private:
  bool read_some();

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  pid_t pid_ = -1;
  int input_ = -1, output_ = -1, errors_ = -1;
  bool is_unread_ = false;
  std::string out_, err_;
};

// `lockstep run --nproc-per-node RANKS sh -c SCRIPT` to its end.
Result run_script(int ranks, const std::string& script, Settings settings = {});
std::vector<std::string> script_args(int ranks, const std::string& script);
// Two ranks, each this very program as `rank MODE`.
std::vector<std::string> rank_args(const std::string& mode, std::vector<std::string> flags = {});

std::vector<std::string> lines_of(const std::string& text);

// The flags with which two launchers of this machine meet, as if they were two hosts; the first is
// the coordinator.
class TwoHosts {
 public:
  TwoHosts();
  // `lockstep run` of host 0 or 1, with two ranks there.
  std::vector<std::string> args(int host, std::vector<std::string> flags_and_program) const;
  static Settings with_token(Settings settings = {});

 private:
  int port_ = 0;
};

// Processes sign in by opening path() for writing, and are gone when nobody holds it open any more.
class Presence {
 public:
  Presence();
  ~Presence();
  const std::string& path() const { return path_; }
  // Once somebody has signed in: waits until all have gone.
  [[nodiscard]] bool everybody_left(std::chrono::milliseconds limit = kPatience) const;

 private:
  test::Folder folder_{test::Folder::On::Disk};
  std::string path_ = folder_ / "fifo";
  int fd_ = -1;
};

}  // namespace lockstep::launch::testing

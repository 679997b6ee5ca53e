// The control segment: a few words of memory in which a launcher tells the ranks of its host, at
// once and without a socket, that one of them has ended and how.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// Names the end that waitpid() reported, to follow "rank 3": "exited with status 3", "was killed by
// SIGKILL".
std::string describe_exit(int wait_status);

// Whether the launcher's segments are this process's to use. Ranks that a rank of it has started,
// of a job of their own, inherit its variables, and have a MASTER_PORT of their own.
bool is_launchers_rank();

// A sealed memfd: the creator's mapping is the only one that can ever be written, and its size is
// fixed, so no rank can forge, damage or truncate it. Safe to use from any number of threads and
// processes; a moved-from Control must only be destroyed.
class Control {
 public:
  // The environment variable in which a rank finds the number of the inherited descriptor.
  static constexpr const char* kVariable = "LOCKSTEP_CONTROL_FD";

  // The launcher's side, for `local_ranks` >= 1 ranks, all running, with no failure. The descriptor
  // is close-on-exec and belongs to the object. Throws ConfigError, Error when the system refuses.
  static Control create(int local_ranks);

  // A rank's side, read-only; nothing when kVariable is unset or !is_launchers_rank(). The
  // inherited descriptor stays open and is not owned. Throws ConfigError when it is not a control
  // segment.
  static std::optional<Control> from_env();

  Control(Control&& other) noexcept;
  Control& operator=(Control&& other) noexcept;
  ~Control();

  int fd() const { return fd_; }
  int local_ranks() const;

  // Starts at 0 and only grows: once for each failure the launcher has seen. One atomic acquire
  // load: a process that sees it grow also sees the end of the rank that it was raised for.
  uint32_t failures() const noexcept;

  // How `local_rank` ended, as describe_exit() says it; nothing while it runs. Throws ConfigError
  // for no such rank.
  std::optional<std::string> fate(int local_rank) const;

  // Why another host's launcher has reported a failure: "rank 3 on host2 was killed by SIGKILL";
  // empty when it has not.
  std::string reason() const;
  // The same to follow a statement: " (rank 3 on host2 was killed by SIGKILL)".
  std::string because() const;

  // The creator only: throws Error in a rank, ConfigError for no such rank.
  void record_exit(int local_rank, int wait_status);
  // Sets reason(). To be called before report_failure(); the first text stays, cut at 255 bytes.
  void explain(std::string_view reason);
  void report_failure();

 private:
  struct Segment;
  Control() = default;
  Segment& writable() const;
  void check_rank(int local_rank) const;

  Segment* segment_ = nullptr;
  int fd_ = -1;
  bool creator_ = false;
};

}  // namespace lockstep

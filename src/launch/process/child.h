// Starts one rank.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "core/files/fd.h"
#include "launch/process/signals.h"

namespace lockstep::launch {

// Where one of a rank's two output streams goes.
struct Target {
  enum Kind {
    Shared,  // the launcher's own
    Piped,   // a pipe to the launcher
    File,    // `fd`, which the caller owns
  } kind = Piped;
  int fd = -1;
};

struct Child {
  pid_t pid = -1;
  Fd out, err;  // the reading ends of the pipes, non-blocking
  // Ends when the child has executed the program; before that, the errno with which it could not.
  // Reading the program may wait for a disk or a network file system.
  Fd starting;
};

struct ChildSpec {
  std::string path;
  std::vector<std::string> command;
  std::vector<std::string> environment;
  // The only descriptors above stderr that the child gets, under the same numbers.
  std::vector<int> inherited;
  Target out, err;
  // The cores it may use; all of the launcher's when empty.
  std::vector<int> cores;
  // stdin: /dev/null, or the launcher's own when set.
  enum class Input { None, Shared } input = Input::None;
};

// In a session of its own, killed by the kernel when this process ends. Does not wait until the
// child has executed the program. Throws Error when the system has no process or descriptor left;
// nothing is left of it then.
Child start_child(const ChildSpec& spec, const Signals& signals);

// Whether the child has executed the program, whose file is `path`; never waits. Throws StartError
// when it could not, Error when it had no descriptor left.
bool has_started(const Fd& starting, const std::string& path);

}  // namespace lockstep::launch

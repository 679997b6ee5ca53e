// Starts one rank.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "launch/fd.h"
#include "launch/signals.h"

namespace lockstep::launch {

// What a rank's three standard streams are.
enum class Streams {
  Shared,  // the launcher's own stdout and stderr
  Piped,   // pipes to the launcher
};

struct Child {
  pid_t pid = -1;
  Fd out, err;  // the pipes' reading ends, non-blocking
};

struct ChildSpec {
  std::string path;
  std::vector<std::string> command;
  std::vector<std::string> environment;
  // The only descriptors above stderr that the child gets, under the same numbers.
  std::vector<int> inherited;
  Streams streams = Streams::Piped;
  // stdin: /dev/null, or the launcher's own when set.
  enum class Input { None, Shared } input = Input::None;
};

// In a session of its own, killed by the kernel when this process ends. On return the child has
// executed the program. Throws StartError when it could not, Error when the system has no process
// or descriptor left; nothing is left of it then.
Child start_child(const ChildSpec& spec, const Signals& signals);

}  // namespace lockstep::launch

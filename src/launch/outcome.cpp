#include "launch/outcome.h"

#include <sys/wait.h>

namespace lockstep::launch {

bool is_success(int wait_status) { return WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0; }

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

int Outcome::exit_code() const {
  for (const RankEnd& end : ends) {
    if (end.rank == cause) return exit_code_of(end.wait_status);
  }
  if (signal) return 128 + *signal;
  return outside ? 1 : 0;
}

}  // namespace lockstep::launch

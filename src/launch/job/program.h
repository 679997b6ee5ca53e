// Finds the program before anything is started, so that a wrong name is one error and not one per
// rank.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launch {

// The file that execvp(`name`) would run. Throws StartError with the reason when that cannot work.
std::string find_program(const std::string& name);

// The StartError for an execve() of `path` that failed with `error`.
[[noreturn]] void refuse_program(const std::string& path, int error);

// Whether execve() of `path` failed with ENOEXEC because it is a script without #!, which execvp()
// hands to /bin/sh. Leaves errno alone, allocates nothing: it is called between fork() and
// execve().
bool is_plain_script(const char* path) noexcept;

// Whether rank 0 binds MASTER_PORT itself, as torch.distributed does: LOCKSTEP_PYTHON_PEERS says
// so, or says nothing and `command`, whose program is at `path`, runs Python (also as in "numactl
// -N 0 python3 train.py"). Throws ConfigError for another value of the variable than 0 and 1.
bool binds_its_port(const std::string& path, const std::vector<std::string>& command);

}  // namespace lockstep::launch

// Finds the program before anything is started, so that a wrong name is one error and not one per
// rank.
#pragma once

#include <string>

namespace lockstep::launch {

// The file that execvp(`name`) would run. Throws StartError with the reason when that cannot work.
std::string find_program(const std::string& name);

// The StartError for an execve() of `path` that failed with `error`.
[[noreturn]] void refuse_program(const std::string& path, int error);

// Whether execve() of `path` failed with ENOEXEC because it is a script without #!, which execvp()
// hands to /bin/sh. Leaves errno alone, allocates nothing: it is called between fork() and
// execve().
bool is_plain_script(const char* path) noexcept;

}  // namespace lockstep::launch

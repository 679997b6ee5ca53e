// The process's descriptors: how many it may have, and which ones a program is to get.
#pragma once

namespace lockstep::launch {

// As many as the system lets this process have: a rank takes up to four here.
void raise_open_files();
// The limit from before, for a child between fork() and execve(); a program with many descriptors
// may not be prepared for it (select()).
void restore_open_files();

// Of this process, `first` and above. Kernels before 5.11 have no system call for it, and a
// sandbox may refuse it: then one by one. False, with errno, when there is no way.
bool close_on_exec_from(int first);
void close_from(int first);

}  // namespace lockstep::launch

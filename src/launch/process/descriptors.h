// Which of the process's descriptors a program is to get.
#pragma once

namespace lockstep::launch {

// Of this process, `first` and above. Kernels before 5.11 have no system call for it, and a
// sandbox may refuse it: then one by one. False, with errno, when there is no way.
bool close_on_exec_from(int first);
void close_from(int first);

}  // namespace lockstep::launch

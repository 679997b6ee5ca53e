// What the threads of a process wait in, by the kernel alone: the process does nothing for it.
#pragma once

#include <sys/types.h>

#include <string>

namespace lockstep::launch {

// "trainer in futex_wait_queue (2), worker in ep_poll, worker runs": each thread's name, and the
// kernel's function that it waits in (/proc/PID/task/*/wchan), or its state where the kernel does
// not tell; the first thread first, those that are alike together, eight texts at most. Empty when
// there is no such process.
std::string waits_of_threads(pid_t pid);

}  // namespace lockstep::launch

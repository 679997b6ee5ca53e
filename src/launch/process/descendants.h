// The processes below this one, in any session or process group.
#pragma once

#include <sys/types.h>

#include <vector>

#include "core/process/stat.h"

namespace lockstep::launch {

// Orphans below this process become its children from now on, instead of init's: a process that
// ends cannot hide its own children.
void adopt_orphans();

// All of them at this moment, from /proc: children before their own children.
std::vector<ProcessStat> descendants();

// Whether `pid` runs, and is below `ancestor`.
bool is_below(pid_t pid, pid_t ancestor);

// A descendant that descendants() does not list from now on, nor what is below it.
void leave_out(pid_t pid);
// All that are there now: the children that a shell has left us with its exec.
void leave_out_present();

// A state beside the kernel's: ProcessStat::has_lost_main.
constexpr char kLostMain = 'M';

// As ProcessStat::state, or kLostMain; 'Z' when there is no such process.
char process_state(pid_t pid);

}  // namespace lockstep::launch

// Takes the job's token out of this process's environment once it has been read.
#pragma once

namespace lockstep::launch {

// LOCKSTEP_TOKEN is gone for children, and its bytes are overwritten where the kernel shows them to
// other processes of the user (/proc/PID/environ). To be called before there are other threads.
void conceal_token() noexcept;

}  // namespace lockstep::launch

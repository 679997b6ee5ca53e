// Takes a variable out of this process's environment once it has been read: the job's token.
#pragma once

namespace lockstep::launch {

// It is gone for children, and the bytes of its value are overwritten where the kernel shows them
// to other processes of the user (/proc/PID/environ). To be called before there are other threads.
void conceal(const char* name) noexcept;

}  // namespace lockstep::launch

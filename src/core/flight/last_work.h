// A function that runs when the process dies of a fault.
#pragma once

namespace lockstep::flight {

// From now on `work` is called once when the process dies of an uncaught exception or of a signal
// of its own (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT), unless the program handles the signal
// itself. It must be async-signal-safe, and return. There is one at a time.
void set_last_work(void (*work)()) noexcept;

}  // namespace lockstep::flight

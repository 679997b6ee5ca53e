// Background threads that receive none of the process's signals.
#pragma once

#include <csignal>
#include <thread>
#include <utility>

namespace lockstep {

// A thread that takes none of the process's signals: they are for the threads that were there.
// Those of its own faults it does take: the kernel ends a process whose thread blocks them, past
// the program's handler and the flight recorder's. Throws std::system_error when there is none to
// be had.
template <class Body>
std::thread thread_without_signals(Body body) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS})
        sigdelset(&all, fault);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const Blocked blocked;
  return std::thread(std::move(body));
}

}  // namespace lockstep

// Background threads that receive none of the process's signals.
#pragma once

#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep {

// That the process can have no further thread, and what to do about it.
class NoThread : public std::system_error {
 public:
  explicit NoThread(const std::system_error& refused)
      : std::system_error(refused),
        what_(std::string(refused.what()) +
              "; raise the limit (ulimit -u, or a container's of processes: pids.max of its "
              "cgroup)") {}

  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

// A thread that takes none of the process's signals: they are for the threads that were there.
// Those of its own faults it does take: the kernel ends a process whose thread blocks them, past
// the program's handler and the flight recorder's. Throws NoThread when there is none to be had.
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
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& refused) {
    throw NoThread(refused);
  }
}

}  // namespace lockstep

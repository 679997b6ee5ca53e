#include "launch/process/signals.h"

#include <fmt/format.h>
#include <sys/signalfd.h>

#include <cerrno>
#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

using namespace std::chrono_literals;

// The terminal sends SIGINT to each process of the foreground group, and timeout(1) and other
// wrappers among them pass theirs on: the launcher gets two within a millisecond. Nobody presses
// Ctrl-C twice on purpose this fast.
constexpr auto kOnePress = 200ms;

}  // namespace

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

Signals::Signals() {
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP}) {
    struct sigaction now;
    sigaction(number, nullptr, &now);
    if (now.sa_handler != SIG_IGN) sigaddset(&wanted, number);
  }
  struct sigaction action {};
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, &pipe_before_);
  sigaction(SIGXFSZ, &action, &size_before_);
  // With an ignored SIGCHLD, inherited from the parent, the kernel would discard exit statuses.
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, &child_before_);
  sigaddset(&wanted, SIGCHLD);
  sigprocmask(SIG_BLOCK, &wanted, &mask_before_);
  fd_ = Fd(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) {
    const int error = errno;
    restore();
    throw Error(fmt::format("[run] signalfd: {}", std::strerror(error)));
  }
}

std::optional<int> Signals::next() {
  signalfd_siginfo info;
  while (read(fd_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    if (info.ssi_signo != SIGINT) return static_cast<int>(info.ssi_signo);
    const auto now = Clock::now();
    if (pressed_ && (!none_since_ || now - *pressed_ < kOnePress)) continue;
    pressed_ = now;
    none_since_ = false;
    return SIGINT;
  }
  none_since_ = true;
  return std::nullopt;
}

void Signals::restore() const {
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  sigaction(SIGXFSZ, &size_before_, nullptr);
  sigaction(SIGCHLD, &child_before_, nullptr);
  sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
}

}  // namespace lockstep::launch

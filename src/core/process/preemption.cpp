#include "lockstep/core/preemption.h"

#include <fmt/format.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

std::atomic<bool> g_exists{false};
std::atomic<int> g_signal{0};
std::atomic<uint64_t> g_received{0};  // a bit for each that has come
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "a signal handler writes them");

uint64_t bit_of(int number) { return uint64_t{1} << (number - 1); }

void on_preemption(int number) {
  g_received.fetch_or(bit_of(number), std::memory_order_relaxed);
  g_signal.store(number, std::memory_order_relaxed);
}

}  // namespace

PreemptionNotice::PreemptionNotice(std::initializer_list<int> numbers) {
  if (g_exists.exchange(true)) {
    throw ConfigError("[preemption] there is a PreemptionNotice already; use that one");
  }
  g_signal.store(0, std::memory_order_relaxed);
  g_received.store(0, std::memory_order_relaxed);
  sigset_t all;
  sigemptyset(&all);
  sigemptyset(&blocked_);
  for (const int number : numbers) {
    struct sigaction action {};
    action.sa_handler = on_preemption;
    action.sa_flags = SA_RESTART;  // a read or wait that it interrupts continues
    struct sigaction old {};
    if (sigaction(number, &action, &old) != 0) {
      const int error = errno;
      restore();
      throw ConfigError(fmt::format("[preemption] signal {} cannot be handled: {}", number,
                                    std::strerror(error)));
    }
    before_.emplace(number, old);
    sigaddset(&all, number);
  }
  sigset_t mask;
  pthread_sigmask(SIG_UNBLOCK, &all, &mask);
  sigandset(&blocked_, &mask, &all);
}

PreemptionNotice::~PreemptionNotice() { restore(); }

void PreemptionNotice::restore() noexcept {
  pthread_sigmask(SIG_BLOCK, &blocked_, nullptr);
  for (auto& [number, action] : before_) {
    const bool came = (g_received.load(std::memory_order_relaxed) & bit_of(number)) != 0;
    if (came && (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL)
      action.sa_handler = SIG_IGN;
    sigaction(number, &action, nullptr);
  }
  g_exists.store(false);
}

std::optional<int> PreemptionNotice::signal() const noexcept {
  const int number = g_signal.load(std::memory_order_relaxed);
  if (number == 0) return std::nullopt;
  return number;
}

}  // namespace lockstep

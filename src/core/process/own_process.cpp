#include "core/process/own_process.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace lockstep {
namespace {

// Between the first process and this one.
std::atomic<uint32_t> g_forks{0};

uint32_t counted_forks() {
  static const int counting =
      pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(counting);
  return g_forks.load(std::memory_order_relaxed);
}

}  // namespace

OwnProcess::OwnProcess() : pid_(getpid()), forks_(counted_forks()) {}

bool OwnProcess::is_here() const noexcept {
  return g_forks.load(std::memory_order_relaxed) == forks_;
}

std::string OwnProcess::refusal(std::string_view what) const {
  return fmt::format(
      "the {} belongs to process {}, which has made this one by fork(): a child cannot use it",
      what, pid_);
}

}  // namespace lockstep

#include "lockstep/core/log.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <new>
#include <string>

namespace lockstep::log {
namespace {

// What LOCKSTEP_LOG may be, in the order of the levels.
constexpr std::string_view kWords[] = {"trace", "debug", "info", "warn", "error", "off"};
// What a line says of its level.
constexpr std::string_view kShown[] = {"trace", "debug", "info", "warning", "error"};

constexpr int kNoRank = -1;
std::atomic<int> g_rank{kNoRank};

// Destructors of static objects may log, too: nothing here has one. In one call, since all ranks
// may have the same stderr.
void print(Level level, std::string_view text) {
  const int rank = g_rank.load(std::memory_order_relaxed);
  try {
    const auto line = fmt::format("[lockstep] {}{}: {}\n",
                                  rank == kNoRank ? std::string() : fmt::format("rank {} ", rank),
                                  kShown[static_cast<int>(level)], text);
    std::fwrite(line.data(), 1, line.size(), stderr);
    std::fflush(stderr);             // a program may have given it a buffer
  } catch (const std::bad_alloc&) {  // not a reason to end a run
  }
}

// The finest level that is written, as a number; beyond them all when none is.
int finest() {
  static const int level = [] {
    constexpr int kDefault = static_cast<int>(Level::Warn);
    const char* wanted = std::getenv("LOCKSTEP_LOG");
    if (wanted == nullptr) return kDefault;
    const auto found = std::find(std::begin(kWords), std::end(kWords), wanted);
    if (found != std::end(kWords)) return static_cast<int>(found - std::begin(kWords));
    print(Level::Warn,
          fmt::format("LOCKSTEP_LOG='{}' is none of trace, debug, info, warn, error, off", wanted));
    return kDefault;
  }();
  return level;
}

}  // namespace

void set_rank(int rank) { g_rank.store(rank, std::memory_order_relaxed); }

bool enabled(Level level) { return static_cast<int>(level) >= finest(); }

void write(Level level, std::string_view text) {
  if (enabled(level)) print(level, text);
}

}  // namespace lockstep::log

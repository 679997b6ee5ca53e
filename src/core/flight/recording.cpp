#include "core/flight/recording.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

namespace lockstep::flight {
namespace {

// Numbers of calls that no launcher has numbered begin after those that one would give.
constexpr uint32_t kFirstOwn = uint32_t{1} << 31;

std::atomic<bool> g_recording{false};
std::mutex g_mutex;
Recording g_recording_made;
uint32_t g_next_call = kFirstOwn;

}  // namespace

void start_recording() {
  const std::lock_guard lock(g_mutex);
  g_recording_made = {};
  g_recording = true;
}

Recording stop_recording() {
  const std::lock_guard lock(g_mutex);
  g_recording = false;
  return std::exchange(g_recording_made, {});
}

bool is_recording() noexcept { return g_recording.load(std::memory_order_relaxed); }

void record(const RecordedSpan& span) noexcept try {
  const std::lock_guard lock(g_mutex);
  if (!g_recording) return;
  if (g_recording_made.spans.size() < Recording::kMost) {
    g_recording_made.spans.push_back(span);
  } else {
    ++g_recording_made.left_out;
  }
} catch (const std::exception&) {
  // It is for people who look at a trace; training continues.
}

uint32_t record_begin(const Operation& operation, uint32_t call) noexcept try {
  const std::lock_guard lock(g_mutex);
  if (!g_recording) return call;
  if (call == 0) {
    call = g_next_call++;
    if (g_next_call == 0) g_next_call = kFirstOwn;
  }
  if (g_recording_made.calls.size() < Recording::kMost) {
    g_recording_made.calls.push_back({operation, call});
    g_recording_made.calls.back().operation.end_ns = 0;
  } else {
    ++g_recording_made.left_out;
  }
  return call;
} catch (const std::exception&) {
  return call;
}

void record_end(uint32_t call, uint64_t at_ns) noexcept try {
  const std::lock_guard lock(g_mutex);
  auto& calls = g_recording_made.calls;
  for (auto at = calls.rbegin(); at != calls.rend(); ++at) {
    if (at->call != call) continue;
    if (at->operation.end_ns == 0) at->operation.end_ns = at_ns;
    return;
  }
} catch (const std::exception&) {
  // As above.
}

}  // namespace lockstep::flight

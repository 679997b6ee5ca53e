// What this rank does, span by span, while it is recorded: for the trace of a few steps.
#pragma once

#include <cstdint>
#include <vector>

#include "core/flight/record.h"

namespace lockstep::flight {

// From when to when, by CLOCK_MONOTONIC.
struct RecordedSpan {
  Activity activity{};
  uint32_t thread = 0;  // the system's number of it
  uint64_t begin_ns = 0, end_ns = 0;
};

// A call of a collective, from its start until this rank saw its end.
struct RecordedCall {
  Operation operation = {};
  uint32_t call = 0;
};

struct Recording {
  // More than this many of a kind are counted and left out.
  static constexpr size_t kMost = 1 << 20;

  std::vector<RecordedSpan> spans = {};  // by their end
  std::vector<RecordedCall> calls = {};  // by their start; end 0: it is not over
  int64_t left_out = 0;
};

// From now on Spans and calls of all threads are recorded. Without a recording each costs one read
// of memory more.
void start_recording();
// Ends it. Empty when none was started.
Recording stop_recording();

// Of rank.cpp.
bool is_recording() noexcept;
void record(const RecordedSpan& span) noexcept;
// `call` is the launcher's number for it, 0 where there is no launcher. Returns the number that
// record_end() knows it by.
uint32_t record_begin(const Operation& operation, uint32_t call) noexcept;
void record_end(uint32_t call, uint64_t at_ns) noexcept;

}  // namespace lockstep::flight

// The flight recorder's side of a program: what its rank does and why it fails, for the launcher's
// report.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "lockstep/core/compiler.h"

namespace lockstep::flight {

// Whose fault an error is.
enum class Blame : uint32_t {
  Own = 1,   // the rank's own: bad data, a failed check, an exception of the program
  Peer = 2,  // of a collective: often the consequence of a failure on another rank
};

// What a rank spends its time on; everything else counts as computing. The launcher sees the first
// two.
enum class Activity : uint32_t { Communication = 0, Data = 1, Checkpoint = 2 };
// How many there are.
constexpr size_t kActivities = 3;

// The rank's side, for the one process that is a rank. Without `lockstep run` all of it costs next
// to nothing. It may be called from any thread, and never throws.

// From now on this rank can say where its code is: when the launcher asks for it, when an exception
// is not caught, and when it dies of a signal of its own (SIGSEGV, SIGBUS, SIGFPE, SIGILL,
// SIGABRT), unless the program handles the signal itself. World::from_env() calls it, and so does
// whichever of the functions below is called first. A stack overflow is reported only where it
// happens on the thread that called attach().
void attach() noexcept;

// From construction to destruction this rank is blocked in `call` (0: in none that has a number),
// or busy with `activity`. Nested ones count once.
class [[nodiscard]] Span {
 public:
  // Begins it: now, or at a time of CLOCK_MONOTONIC that has just been looked up.
  explicit Span(Activity activity, uint32_t call = 0, uint64_t since_ns = 0) noexcept;
  ~Span() { end(); }
  // Ends it before its destruction, in the same way.
  void end(uint64_t at_ns = 0) noexcept;
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Activity activity_;
  bool outermost_;         // of its activity, among all threads: for the launcher
  uint64_t since_ns_ = 0;  // 0: not the outermost of its thread
};

// How long this process has been in Spans, by Activity, with and without a launcher. Time in a Span
// within another one of the same thread belongs to the outer one, so that the sum is at most the
// time that has passed. A Span that has not ended is not in it.
std::array<uint64_t, kActivities> own_busy_ns() noexcept;
// From now on own_busy_ns() leaves out the calling thread, which works in the background of
// training.
void exclude_this_thread() noexcept;

// This rank fails with `text`. The first one stays, except that an Own one replaces a Peer one.
// Goes to the launcher, and to the file that TORCHELASTIC_ERROR_FILE names, as torchrun's workers
// write it. Programs call it where main() catches an exception; uncaught exceptions and CommErrors
// are reported without a call.
void report_failure(std::string_view text, Blame blame = Blame::Own) noexcept;

// What the last comparison of the ranks found: `text` as "pass 300 of Ddp 1: the ranks are the
// same".
void note_comparison(std::string_view text) noexcept;

}  // namespace lockstep::flight

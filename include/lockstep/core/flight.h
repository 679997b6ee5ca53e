// The flight recorder: what each rank of a host did last, in memory that its launcher reads while
// the rank runs and after it has ended.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::flight {

// The environment variable in which a rank finds the number of the inherited descriptor.
constexpr const char* kVariable = "LOCKSTEP_FLIGHT_FD";
// How many of its last calls each rank keeps.
constexpr uint32_t kOperations = 32;

// A call of a collective, as it was announced. Texts are cut to fit.
struct Operation {
  uint64_t start_ns = 0, end_ns = 0;  // CLOCK_MONOTONIC; end 0 until somebody has waited for it
  int64_t count = -1;                 // elements; -1 where that says nothing
  int32_t peer = -1;                  // root, receiver or sender; -1 for none
  uint32_t number = 0;                // of the call in its group, as errors quote it; 0: none yet
  std::array<char, 24> what{};        // "all_reduce sum"
  std::array<char, 12> dtype{};
  std::array<char, 40> label{};

  // "all_reduce sum #412 (bucket 3, float32 x 1048576)"
  std::string text() const;
};

// Whose fault an error is.
enum class Blame : uint32_t {
  Own = 1,   // the rank's own: bad data, a failed check, an exception of the program
  Peer = 2,  // of a collective: often the echo of what happened on another rank
};

// What a rank spends its time on; everything else counts as computing. The launcher sees the first
// two.
enum class Activity : uint32_t { Communication = 0, Data = 1, Checkpoint = 2 };
constexpr size_t kActivities = 3;

// The rank's side, for the one process that is a rank. Without `lockstep run` all of it costs next
// to nothing. It may be called from any thread, and never throws.

// From now on this rank can say where its code is: when the launcher asks for it, when an exception
// is not caught, and when it dies of a signal of its own (SIGSEGV, SIGBUS, SIGFPE, SIGILL,
// SIGABRT), of which a program's own handlers stay as they are. World::from_env() calls it, and so
// does whatever is called first of the functions below. Only the thread that calls it can tell of a
// stack that is full.
void attach() noexcept;

// Announces a call; returns its number, from 1; 0 when nothing is recorded.
uint32_t begin(const Operation& operation) noexcept;
// The transport has given that call its number in the group.
void number(uint32_t call, uint64_t in_group) noexcept;
// The call is over.
void end(uint32_t call) noexcept;

// From construction to destruction this rank is blocked in `call` (0: in none that has a number),
// or busy with `activity`. Nested ones count once.
class [[nodiscard]] Span {
 public:
  // Begins it.
  explicit Span(Activity activity, uint32_t call = 0) noexcept;
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Activity activity_;
  bool outermost_;         // of its activity, among all threads: for the launcher
  uint64_t since_ns_ = 0;  // 0: not the outermost of its thread
};

// How long this process has been in Spans, by Activity, with and without a launcher. Time in a Span
// within another one of the same thread belongs to the outer one, so that the sum is at most the
// time that has passed. A Span that still goes on is not in it.
std::array<uint64_t, kActivities> own_busy_ns() noexcept;
// What the calling thread does from now on runs beside training, and is not counted there.
void exclude_this_thread() noexcept;

// This rank fails with `text`. The first one stays, except that an Own one replaces a Peer one.
// Goes to the launcher, and to the file that TORCHELASTIC_ERROR_FILE names, as torchrun's workers
// write it. Programs call it where main() catches what went wrong; exceptions that nobody catches
// and CommErrors get here by themselves.
void report_failure(std::string_view text, Blame blame = Blame::Own) noexcept;

// What the last comparison of the ranks found: `text` as "pass 300 of Ddp 1: the ranks are alike".
void note_comparison(std::string_view text) noexcept;

// The launcher's side.

struct Comparison {
  uint64_t at_ns = 0;
  std::string text;
};

struct Failure {
  uint64_t at_ns = 0;
  Blame blame = Blame::Own;
  std::string text;
};

// An address in a program or library: `offset` as in the symbol table of the file.
struct Frame {
  std::string module;
  uint64_t offset = 0;
};

struct Stack {
  uint64_t at_ns = 0;
  int signal = 0;             // that it died of; 0 when it was asked
  std::vector<Frame> frames;  // from the innermost; of a deep one the middle is left out
};

// The signal by which the launcher asks the main thread of a rank for its stack; harmless where it
// is caught, deadly elsewhere.
int question() noexcept;

struct Log {
  uint32_t calls = 0;           // announced so far
  std::vector<Operation> last;  // the last of them, oldest first, at most kOperations
  uint32_t blocked_in = 0;      // the number of the call it waits in; 0 for none
  uint64_t blocked_since_ns = 0;
  std::array<uint64_t, 2> busy_ns{};  // by Activity, up to now
  std::optional<Failure> failure;
  std::optional<Comparison> comparison;  // the last
  std::optional<Stack> stack;            // the last that it told

  // "in all_reduce sum #412 (bucket 3, float32 x 8), for 0.31 s", or "in no collective; the last
  // was broadcast #411 (float32 x 8), 1.20 s before", at `now_ns`; empty when it has called none.
  std::string where(uint64_t now_ns) const;
};

uint64_t now_ns() noexcept;  // CLOCK_MONOTONIC

struct Block;

// Memory for the ranks of a host. Each maps its own part alone. What is read from it has been
// written by the ranks and is checked.
class Segment {
 public:
  // The descriptor is close-on-exec and belongs to the object. Throws Error.
  explicit Segment(int local_ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int fd() const { return fd_; }
  Log read(int local_rank) const;
  // Whether the rank answers question().
  bool listens(int local_rank) const;
  // How often the rank has said where it is.
  uint32_t stacks_told(int local_rank) const;

 private:
  const Block& block(int local_rank) const;

  int ranks_;
  int fd_ = -1;
  void* memory_ = nullptr;
};

}  // namespace lockstep::flight

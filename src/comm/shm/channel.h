// How ranks that share memory synchronise: the operation that each announces, which ranks have
// arrived, which have ended. No torch, so that sanitizers can watch all of it.
//
// Each rank owns one RankBlock and alone writes it. Its three counters only grow, and wrap:
//   posted   operations announced (the announcement of operation s is in ring[s % kRing])
//   phase    meetings within operations
//   done     operations whose part on this rank is over
// Every rank announces the same operations in the same order, so equal counters mean equal
// operations, and a rank that sees another's announcement differ from its own knows at once that
// the two disagree.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/health/launcher_status.h"
#include "comm/host/processes.h"

namespace lockstep::comm {

// How long a rank waits for the others.
struct Patience {
  using Clock = std::chrono::steady_clock;

  std::chrono::milliseconds timeout;                   // then it is an error
  Clock::time_point until = Clock::time_point::max();  // then the wait ends for now
  // When the wait began, of which this may be a later part.
  Clock::time_point* since = nullptr;
};

// The result of a waiting rank's other work.
enum class Idle { Nothing, Waits, Moved };

// What a rank announces before it waits for the others. What all ranks must agree on comes first,
// in a cache line of its own (in the ring): the others read no more of it, unless the data is in
// group memory.
struct Announcement {
  // Agreed.
  char what[24] = {};   // "all_reduce sum"
  char dtype[12] = {};  // "float32"
  int32_t root = -1;
  int64_t count = 0;         // elements
  uint64_t counts_hash = 0;  // of a list of counts, and of what an average is divided by
  uint32_t caller = 0;       // 0: not said
  uint32_t pass = 0;         // of the caller's
  // This rank's own.
  int64_t segment = -1;  // of group memory that the data is in, -1 for private memory
  int64_t offset = 0;    // in bytes, from the rank's part of it
  int64_t own_bytes = 0;
  char label[40] = {};
  char caller_name[16] = {};
  char advice[128] = {};  // for the error of a rank that finds that the ranks disagree
  int32_t divide_by = 0;
  char list[44] = {};  // of counts, in the place of `count`

  bool agrees_with(const Announcement& other) const;
  // "all_reduce sum #412 (bucket 3, float32 x 1048576)"
  std::string text(uint32_t sequence) const;
};

// A counter that one rank advances and others wait for. Two cache lines: neighbours are fetched
// together.
struct alignas(128) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};

struct RankBlock {
  static constexpr uint32_t kRing = 64;

  Counter posted;
  Counter phase;
  Counter done;
  Counter bell;  // rung by others when a message for this rank was put in or taken out
  std::atomic<int32_t> pid;
  // Whether this rank has ended the group; `reason` is valid then. Of kSaid it is the cause, of
  // kThrew perhaps a consequence of what another rank did.
  static constexpr uint32_t kThrew = 1, kSaid = 2;
  std::atomic<uint32_t> aborted;
  std::atomic<uint32_t> left;  // this rank has destroyed its group
  char reason[492];
  // What this rank shows the others, outside of operations and messages.
  static constexpr size_t kShown = 508;
  std::atomic<uint32_t> shown;  // the number of it
  char shown_bytes[kShown];
  // Only here, since a type aligned to more than malloc gives would make each operation's memory
  // slow to get.
  struct alignas(64) Entry : Announcement {};
  Entry ring[kRing];
};

class Channel {
 public:
  using Clock = std::chrono::steady_clock;

  // The world calls rank r members[r], messages called[r] (r, where a list is empty). `blocks` are
  // the ranks' blocks, in memory that all map and that was zero when the first came (or had all
  // counters at one number, at which they go on). Returns after all ranks have arrived.
  // With `launcher_status` peers are processes of this machine whose death is noticed (without, in
  // tests that run ranks as threads), also before they arrive where `processes` has them. Throws
  // CommError.
  Channel(RankBlock* blocks, int rank, int size, std::chrono::milliseconds timeout,
          std::shared_ptr<const LauncherStatus> launcher_status, std::vector<int> members = {},
          std::vector<int> called = {}, WatchedProcesses processes = {}, int numa_node = -1);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  // Ranks that still need this one's part learn that it has left.
  ~Channel();

  int rank() const { return rank_; }
  int size() const { return size_; }
  // By rank, what each gave.
  const std::vector<int>& numa_nodes() const { return numa_nodes_; }
  // By rank; none where it is not watched, as this one.
  const WatchedProcesses& processes() const { return processes_; }
  int name_of(int rank) const { return called_.empty() ? rank : called_[rank]; }
  // With its number in the world, where that is another: rank_text().
  std::string text_of(int rank, std::string more = {}) const;

  // Announces the next operation; returns its number.
  uint32_t post(const Announcement& announcement);
  uint32_t next_sequence() const { return posted_ + 1; }

  // The waits return false when `patience.until` came first. They throw CommError when a rank is
  // lost or late. Waits until all ranks have announced operation `sequence`, and compares. Throws
  // on all ranks when they disagree.
  bool await_posted(uint32_t sequence, const Patience& patience);
  // The same without waiting: false when some rank has not.
  bool all_posted(uint32_t sequence);

  const Announcement& announcement(int rank, uint32_t sequence) const;

  // A meeting of all ranks within an operation: this rank has come; have the others?
  void arrive();
  bool all_met() const;
  uint32_t meetings() const { return phase_; }
  bool await_met(uint32_t sequence, const Patience& patience);

  // Operations are done in the order in which they were posted.
  void set_done();
  bool all_done(uint32_t sequence) const;
  bool await_done(uint32_t sequence, const Patience& patience);

  // Waits until `ready` holds; rung by `ring(rank)`. `what` says for the error what is waited for.
  bool await_bell(const std::function<bool()>& ready, const std::function<std::string()>& what,
                  int peer, const Patience& patience);
  void ring(int rank);

  // Shows the others up to RankBlock::kShown bytes, under a number that grows: what was shown
  // before has been seen by all who wait for it.
  void show(uint32_t number, std::string_view bytes);
  // Waits until `peer` shows it. `what` says for the error what is waited for.
  const char* see(int peer, uint32_t number, const std::string& what, const Patience& patience);

  // What to do now and then while waiting: `messages` where an operation cannot go on, `everything`
  // elsewhere. After Idle::Waits it is called again soon.
  void set_idle_work(std::function<Idle()> messages, std::function<Idle()> everything) {
    move_messages_ = std::move(messages);
    move_everything_ = std::move(everything);
  }

  // Throws what killed the group, if anything has.
  void check_alive();
  // That failure, or one that a wait would find: a rank that has aborted or ended, what the
  // launcher reports.
  std::optional<std::string> failure();
  // Ends the group, here and on the other ranks. Any thread.
  void abort_all(std::string_view why) noexcept;

  // Tells the others that this rank throws, and throws it. The group has failed from now on.
  [[noreturn]] void fail(const std::string& text);

 private:
  bool have_all(Counter RankBlock::*counter, uint32_t value) const;
  bool await_counter(Counter RankBlock::*counter, uint32_t value, uint32_t sequence,
                     const Patience& patience);
  void compare(int peer, uint32_t sequence);
  // " (or one rank ran out of batches: see Join)": of this rank's announcement, or of the peer's.
  std::string advice(uint32_t sequence, int peer) const;
  // Throws when `peer`, which is `needed`, has died, aborted or left, or the launcher says that a
  // rank has.
  void check_peer(int peer, const std::function<bool()>& needed, const std::string& doing,
                  const std::string& advice = {});
  // "rank 1 aborted: out of data", where it has; by RankBlock::kSaid only, or also by kThrew.
  std::optional<std::string> reason_of(int rank, uint32_t least) const;
  // Of the first rank by kSaid: that others have ended is a consequence.
  std::optional<std::string> cause_said() const;
  void end(std::string_view why, uint32_t how) noexcept;
  bool is_gone(int peer) const;
  bool has_left(int peer);
  std::string fate_of(int peer, std::chrono::milliseconds patience) const;
  std::string where_is(int peer) const;
  static void advance(Counter& counter);

  RankBlock* blocks_;
  int rank_, size_;
  bool spin_ = false;  // all ranks have a core of their own; not before they have come
  WatchedProcesses processes_;
  std::vector<Clock::time_point> seen_leaving_;  // by rank
  std::vector<int> members_;
  std::vector<int> called_;
  std::vector<int> numa_nodes_;
  std::shared_ptr<const LauncherStatus> launcher_status_;
  uint32_t posted_, phase_;
  // All are known to have done it; who looks takes a cache line from each of the others.
  mutable uint32_t all_done_;
  std::function<Idle()> move_messages_ = [] { return Idle::Nothing; };
  std::function<Idle()> move_everything_ = move_messages_;
  // Of `reason` in this rank's block, which the first one writes.
  std::atomic<bool> aborting_ = false;
  std::string dead_;  // known to the thread that calls
};

}  // namespace lockstep::comm

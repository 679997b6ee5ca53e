// The collectives of ranks that share memory, on plain pointers. No torch.
//
// Data in group memory is reduced where it lies: rank r adds slice r of all ranks' buffers in tree
// order and writes the sum back to all (the direct-exchange all-reduce of Rabenseifner, 2004,
// without the exchange). Everything else is staged: each rank copies a chunk into its own slot, all
// synchronise, each reads what it needs from the others' slots. Two slots a rank alternate, so one
// synchronisation a chunk is enough.
//
// Operations run in the order in which they were started. There is no background thread: inside any
// call all operations progress that can, not only the one that the call waits for.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "comm/reduce/reduce.h"
#include "comm/shm/channel.h"
#include "comm/shm/mailbox.h"
#include "comm/shm/numa_nodes.h"
#include "lockstep/core/shard.h"

namespace lockstep::comm {

// One rank's buffer for the elements [0, bytes).
struct Piece {
  char* data = nullptr;
  int64_t bytes = 0;
};

// An operation that was started.
class Operation {
 public:
  virtual ~Operation() = default;

  Announcement announcement;
  std::chrono::milliseconds timeout{0};
  uint32_t call = 0;           // the flight recorder's, which is told the sequence
  std::shared_ptr<void> keep;  // what owns the buffers

 protected:
  friend class Exchange;
  // Fills this rank's slot with what others need first; before the announcement.
  virtual void stage(class Exchange&) {}
  // Everything after the announcement, as far as it goes without waiting; all ranks have announced.
  // False when it cannot go on before all have come to the meeting at which this rank is: it is
  // called again then.
  virtual bool step(class Exchange& exchange) = 0;
  // False for an operation that works on group memory alone: it may be announced while earlier ones
  // have not run, and is over only when all ranks have run it.
  virtual bool uses_slots() const { return true; }

  bool announced = false;
  uint32_t sequence = 0;  // once it is announced
  bool agreed = false;    // all have announced the same
  bool ran = false;
  std::chrono::steady_clock::time_point next_look{};  // at the peers, by a rank that polls
  // Since when this rank has waited for it in vain, and how much had got done by then.
  std::chrono::steady_clock::time_point waiting_since{};
  uint64_t progress = 0;
};

class Exchange {
 public:
  static constexpr int64_t kChunk = 256 << 10;
  // A rank's part of a chunk has a cache line for its size, and one for data at least.
  static constexpr int kMostRanks = kChunk / 128;
  // Throws ConfigError for more ranks.
  static void check_size(int size);

  // Shared memory for `size` ranks.
  static int64_t bytes_for(int size);

  // `memory` is as Channel's blocks: zero when the first rank comes. `numa_node`: the one that this
  // rank is on, -1 where that is not known.
  Exchange(char* memory, int rank, int size, std::chrono::milliseconds timeout,
           std::shared_ptr<const LauncherStatus> launcher_status, std::vector<int> members = {},
           std::vector<int> called = {}, WatchedProcesses processes = {}, int numa_node = -1);

  int rank() const { return channel_.rank(); }
  int size() const { return channel_.size(); }
  Channel& channel() { return channel_; }
  const NumaNodes& numa_nodes() const { return numa_nodes_; }

  // Queues the operation, or the message, and takes all that was started as far as it goes without
  // waiting.
  void start(std::shared_ptr<Operation> operation);
  void start(std::shared_ptr<Message> message);
  // Blocks until the operation is over on this rank, or the message has been put in whole (sender)
  // or taken out whole (receiver). False when `until` came first. Throws CommError.
  using Clock = Channel::Clock;
  bool finish(const std::shared_ptr<Operation>& operation,
              Clock::time_point until = Clock::time_point::max());
  bool finish(const std::shared_ptr<Message>& message,
              Clock::time_point until = Clock::time_point::max());
  // Takes all that was started as far as it goes without waiting; true when finish() would not
  // wait. Throws what finish() would throw at once.
  bool advance(const std::shared_ptr<Operation>& operation);
  bool advance(const std::shared_ptr<Message>& message);
  void move_on();

  // Where group memory lies: part(segment, rank) for announcements with segment >= 0.
  void set_group_memory(std::function<char*(int64_t segment, int rank)> part) {
    part_ = std::move(part);
  }
  char* part_of(int rank, uint32_t sequence) const;
  bool all_in_group_memory(uint32_t sequence) const;
  bool none_in_group_memory(uint32_t sequence) const;

  // For operations. slot() is the chunk that `rank` staged in the current turn; result() a chunk
  // all ranks may write slices of.
  char* slot(int rank, int64_t turn) const;
  // Of all ranks.
  const void* const* slots(int64_t at_turn) const { return all_slots_[at_turn % 2].data(); }
  char* result(int64_t turn) const;
  int64_t turn = 0;

 private:
  bool announce_ready();
  bool move();
  bool run_head();
  bool await_head(const Patience& patience);
  bool is_over(const Operation& operation) const;
  void count_from_progress(Operation& operation) const;
  template <class Started>
  bool look(const std::shared_ptr<Started>& started);

  char* slots_;
  std::array<std::vector<const void*>, 2> all_slots_;  // by turn
  Channel channel_;
  NumaNodes numa_nodes_;
  Mailbox mailbox_;
  std::function<char*(int64_t, int)> part_;
  std::deque<std::shared_ptr<Operation>> queue_;      // not run yet
  std::deque<std::shared_ptr<Operation>> lingering_;  // run, but others may still use the buffers
  uint64_t progress_ = 0;                             // steps of operations
};

// Makers of the operations; buffers are this rank's.
std::shared_ptr<Operation> all_reduce(const Reduction& reduction, Piece data);
std::shared_ptr<Operation> reduce_to(int root, const Reduction& reduction, Piece data);
// outputs[j]: combined over the ranks in runs[j], which are in order.
std::shared_ptr<Operation> reduce_scatter(const Reduction& reduction, std::vector<Piece> outputs,
                                          std::vector<Piece> inputs, std::vector<Range> runs);
std::shared_ptr<Operation> all_gather(std::vector<Piece> outputs, Piece input);
std::shared_ptr<Operation> broadcast(int root, int rank, Piece data);
std::shared_ptr<Operation> gather(int root, int rank, std::vector<Piece> outputs, Piece input);
std::shared_ptr<Operation> scatter(int root, int rank, Piece output, std::vector<Piece> inputs);
std::shared_ptr<Operation> all_to_all(std::vector<Piece> outputs, std::vector<Piece> inputs);
std::shared_ptr<Operation> barrier();

}  // namespace lockstep::comm

#include "comm/shm/exchange.h"

#include <fmt/format.h>

#include "core/divided_up.h"
#include "core/flight/record.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr int64_t kAlign = 4096;
// How often a rank that only polls checks its peers.
constexpr std::chrono::milliseconds kLook(10);

int64_t aligned(int64_t bytes) { return rounded_up(bytes, kAlign); }

int64_t blocks_bytes(int size) { return aligned(size * static_cast<int64_t>(sizeof(RankBlock))); }
int64_t mailbox_bytes(int size) { return aligned(Mailbox::bytes_for(size)); }

}  // namespace

void Exchange::check_size(int size) {
  if (size <= kMostRanks) return;
  throw ConfigError(
      fmt::format("[shm] {} ranks on one host: {} at most can share memory. Run fewer, or set "
                  "LOCKSTEP_BACKEND=tcp",
                  size, kMostRanks));
}

int64_t Exchange::bytes_for(int size) {
  return blocks_bytes(size) + mailbox_bytes(size) + 2 * (size + 1) * kChunk;
}

Exchange::Exchange(char* memory, int rank, int size, std::chrono::milliseconds timeout,
                   std::shared_ptr<const LauncherStatus> launcher_status, std::vector<int> members,
                   std::vector<int> called, WatchedProcesses processes, int numa_node)
    : slots_(memory + blocks_bytes(size) + mailbox_bytes(size)),
      channel_(reinterpret_cast<RankBlock*>(memory), rank, size, timeout,
               std::move(launcher_status), std::move(members), std::move(called),
               std::move(processes), numa_node),
      numa_nodes_(channel_.numa_nodes(), rank),
      mailbox_(memory + blocks_bytes(size), channel_) {
  for (int64_t t = 0; t < 2; ++t) {
    for (int r = 0; r < size; ++r) all_slots_[t].push_back(slot(r, t));
  }
  channel_.set_idle_work(
      [this] {
        return mailbox_.step() ? Idle::Moved : mailbox_.waiting() > 0 ? Idle::Waits : Idle::Nothing;
      },
      [this] {
        return move()                                      ? Idle::Moved
               : mailbox_.waiting() > 0 || !queue_.empty() ? Idle::Waits
                                                           : Idle::Nothing;
      });
}

char* Exchange::slot(int rank, int64_t at_turn) const {
  return slots_ + (2 * rank + at_turn % 2) * kChunk;
}
char* Exchange::result(int64_t at_turn) const {
  return slots_ + (2 * size_t(channel_.size()) + at_turn % 2) * kChunk;
}

bool Exchange::all_in_group_memory(uint32_t sequence) const {
  for (int r = 0; r < channel_.size(); ++r) {
    if (channel_.announcement(r, sequence).segment < 0) return false;
  }
  return true;
}

bool Exchange::none_in_group_memory(uint32_t sequence) const {
  for (int r = 0; r < channel_.size(); ++r) {
    if (channel_.announcement(r, sequence).segment >= 0) return false;
  }
  return true;
}

char* Exchange::part_of(int rank, uint32_t sequence) const {
  const Announcement& announcement = channel_.announcement(rank, sequence);
  return part_(announcement.segment, rank) + announcement.offset;
}

void Exchange::start(std::shared_ptr<Operation> operation) {
  channel_.check_alive();
  queue_.push_back(std::move(operation));
  move();
}

void Exchange::start(std::shared_ptr<Message> message) {
  channel_.check_alive();
  mailbox_.start(std::move(message));
  move();
}

// Announces what may be announced: in order, and staged operations only at the head, where the
// slots are theirs.
bool Exchange::announce_ready() {
  bool head = true, moved = false;
  for (const auto& operation : queue_) {
    if (!operation->announced) {
      if (!head && operation->uses_slots()) return moved;
      // The ring's entry is free when all ranks are done with the operation that had it.
      if (!channel_.all_done(channel_.next_sequence() - RankBlock::kRing)) return moved;
      operation->stage(*this);
      operation->sequence = channel_.post(operation->announcement);
      operation->announced = true;
      flight::number(operation->call, operation->sequence);
      moved = true;
    }
    head = false;
  }
  return moved;
}

// Does all that can be done without waiting; true when that was something.
bool Exchange::move() {
  bool moved = mailbox_.step();
  moved = announce_ready() || moved;
  while (!queue_.empty() && run_head()) {
    announce_ready();
    moved = true;
  }
  return moved;
}

void Exchange::move_on() {
  channel_.check_alive();
  move();
}

// True when it is over.
bool Exchange::run_head() {
  const std::shared_ptr<Operation>& head = queue_.front();
  if (!head->announced) return false;
  head->agreed = head->agreed || channel_.all_posted(head->sequence);
  if (!head->agreed) return false;
  const uint32_t meetings = channel_.meetings();
  const bool over = head->step(*this);
  if (over || channel_.meetings() != meetings) ++progress_;
  if (!over) return false;
  channel_.set_done();
  head->ran = true;
  if (head->uses_slots()) {
    head->keep.reset();
  } else {
    lingering_.push_back(std::move(queue_.front()));
  }
  queue_.pop_front();
  while (!lingering_.empty() && channel_.all_done(lingering_.front()->sequence)) {
    lingering_.front()->keep.reset();
    lingering_.pop_front();
  }
  return true;
}

// Waits for what the head of the queue waits for.
bool Exchange::await_head(const Patience& patience) {
  const std::shared_ptr<Operation> head = queue_.front();
  if (!head->announced)
    return channel_.await_done(channel_.next_sequence() - RankBlock::kRing, patience);
  if (head->agreed) return channel_.await_met(head->sequence, patience);
  if (!channel_.await_posted(head->sequence, patience)) return false;
  head->agreed = true;
  return true;
}

bool Exchange::is_over(const Operation& operation) const {
  return operation.ran && (operation.uses_slots() || channel_.all_done(operation.sequence));
}

// A deadline starts again whenever something has got done.
void Exchange::count_from_progress(Operation& operation) const {
  if (operation.progress == progress_) return;
  operation.progress = progress_;
  operation.waiting_since = {};
}

bool Exchange::finish(const std::shared_ptr<Operation>& operation, Clock::time_point until) {
  channel_.check_alive();
  if (until == Clock::time_point::max()) operation->waiting_since = {};
  const Patience patience{operation->timeout, until, &operation->waiting_since};
  while (!operation->ran) {
    announce_ready();
    while (!operation->ran && run_head()) announce_ready();
    count_from_progress(*operation);
    if (!operation->ran && !await_head(patience)) return false;
  }
  count_from_progress(*operation);  // it may have run in another call
  if (!is_over(*operation) && !channel_.await_done(operation->sequence, patience)) return false;
  operation->keep.reset();
  return true;
}

bool Exchange::finish(const std::shared_ptr<Message>& message, Clock::time_point until) {
  if (message->over) return true;
  channel_.check_alive();
  const auto is_over = [&] {
    mailbox_.step();
    if (!message->over && !queue_.empty()) move();
    return message->over;
  };
  return channel_.await_bell(is_over, [&] { return message->text(); }, message->peer,
                             {message->timeout, until, &message->waiting_since});
}

bool Exchange::advance(const std::shared_ptr<Operation>& operation) {
  move_on();
  return is_over(*operation) || look(operation);
}

bool Exchange::advance(const std::shared_ptr<Message>& message) {
  move_on();
  return message->over || look(message);
}

// A wait of no length finds what ends a wait: a lost peer, the deadline. Each call has looks of its
// own, since those for another may see neither.
template <class Started>
bool Exchange::look(const std::shared_ptr<Started>& started) {
  const auto now = Clock::now();
  if (now < started->next_look) return false;
  started->next_look = now + kLook;
  return finish(started, now);
}

}  // namespace lockstep::comm

#include "comm/exchange.h"

#include <algorithm>


namespace lockstep::comm {
namespace {

constexpr int64_t kAlign = 4096;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int64_t blocks_bytes(int size) { return aligned(size * static_cast<int64_t>(sizeof(RankBlock))); }
int64_t mailbox_bytes(int size) { return aligned(Mailbox::bytes_for(size)); }

}  // namespace

Range slice_of(int rank, int size, int64_t count, int64_t element_bytes) {
  const int64_t line = std::max<int64_t>(1, 64 / element_bytes);
  const Range lines = Shard{rank, size}.of((count + line - 1) / line);
  return {std::min(count, lines.begin * line), std::min(count, lines.end * line)};
}

int64_t Exchange::bytes_for(int size) {
  return blocks_bytes(size) + mailbox_bytes(size) + 2 * (size + 1) * kChunk;
}

Exchange::Exchange(char* memory, int rank, int size, std::chrono::milliseconds timeout, bool watch_processes,
                   std::vector<int> members, std::vector<int> called)
    : slots_(memory + blocks_bytes(size) + mailbox_bytes(size)),
      channel_(reinterpret_cast<RankBlock*>(memory), rank, size, timeout, watch_processes, std::move(members),
               std::move(called)),
      mailbox_(memory + blocks_bytes(size), channel_) {
  channel_.set_idle_work([this] { return mailbox_.step(); });
}

char* Exchange::slot(int rank, int64_t at_turn) const { return slots_ + (2 * rank + at_turn % 2) * kChunk; }
char* Exchange::result(int64_t at_turn) const { return slots_ + (2 * size_t(channel_.size()) + at_turn % 2) * kChunk; }

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
  pump();
}

// Announces what may be announced: in order, and staged operations only at the head, where the slots are theirs.
void Exchange::announce_ready() {
  bool head = true;
  for (const auto& operation : queue_) {
    if (operation->sequence == 0) {
      if (!head && operation->uses_slots()) return;
      // The ring's entry is free when all ranks are done with the operation that had it.
      const uint32_t oldest = channel_.next_sequence() - RankBlock::kRing;
      if (!head && !channel_.all_done(oldest)) return;
      if (head) channel_.await_done(oldest, operation->timeout);
      operation->stage(*this);
      operation->sequence = channel_.post(operation->announcement);
    }
    head = false;
  }
}

// Runs what can be run without waiting; true when the queue is empty.
bool Exchange::pump() {
  mailbox_.step();
  announce_ready();
  while (!queue_.empty()) {
    Operation& head = *queue_.front();
    if (!channel_.all_posted(head.sequence) || !head.is_short(*this)) return false;
    run_head();
    announce_ready();
  }
  return true;
}

void Exchange::run_head() {
  const std::shared_ptr<Operation> head = queue_.front();
  head->run(*this);
  channel_.set_done();
  head->ran = true;
  queue_.pop_front();
  lingering_.push_back(head);
  while (!lingering_.empty() && channel_.all_done(lingering_.front()->sequence)) {
    lingering_.front()->keep.reset();
    lingering_.pop_front();
  }
}

void Exchange::finish(const std::shared_ptr<Operation>& operation) {
  channel_.check_alive();
  while (!operation->ran) {
    announce_ready();
    Operation& head = *queue_.front();
    channel_.await_posted(head.sequence, operation->timeout);
    run_head();
  }
  if (!operation->uses_slots()) channel_.await_done(operation->sequence, operation->timeout);
  operation->keep.reset();
}

bool Exchange::advance(const Operation& operation) {
  channel_.check_alive();
  pump();
  return operation.ran && (operation.uses_slots() || channel_.all_done(operation.sequence));
}

}  // namespace lockstep::comm

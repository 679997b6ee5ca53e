#include "comm/shm/mailbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm {
namespace {

constexpr uint32_t kSlots = 2;
constexpr int64_t kSlotBytes = 32 << 10;
// Large slots of a sender, which any of its messages may use. Each pair has small ones of its own,
// so that a message progresses independently of the others.
constexpr int kMostLarge = 16;
constexpr int64_t kSmallBytes = 512;
constexpr int32_t kSmall = -1;

int large_slots(int size) { return std::min(kMostLarge, static_cast<int>(kSlots) * (size - 1)); }

}  // namespace

struct Mailbox::Header {
  int64_t count;
  int32_t tag;
  char dtype[16];
};

struct Mailbox::Box {
  alignas(128) std::atomic<uint32_t> put;
  alignas(128) std::atomic<uint32_t> taken;
  alignas(128) Header header;  // of the message whose first piece is in the slots
  int32_t large[kSlots];       // which of the sender's large slots holds the piece, or kSmall
  char small[kSlots][kSmallBytes];
};

std::string Message::text() const {
  return fmt::format("{} rank {} ({}message {}, {} x {})", sending ? "send to" : "recv from",
                     peer_name, label.empty() ? "" : label + ", ", tag, dtype, count);
}

int64_t Mailbox::bytes_for(int size) {
  return boxes_bytes(size) + int64_t{size} * large_slots(size) * kSlotBytes;
}

int64_t Mailbox::boxes_bytes(int size) {
  return int64_t{size} * size * static_cast<int64_t>(sizeof(Box));
}

Mailbox::Mailbox(char* memory, Channel& channel)
    : memory_(memory),
      channel_(channel),
      lanes_(2 * channel.size()),
      uses_(large_slots(channel.size())) {}

Mailbox::Box& Mailbox::box(int from, int to) const {
  return *reinterpret_cast<Box*>(memory_ + (int64_t{from} * channel_.size() + to) *
                                               static_cast<int64_t>(sizeof(Box)));
}

char* Mailbox::large_slot(int from, int32_t slot) const {
  const int64_t index = int64_t{from} * large_slots(channel_.size()) + slot;
  return memory_ + boxes_bytes(channel_.size()) + index * kSlotBytes;
}

// One of this rank's large slots that no receiver still has to read, or kSmall.
int32_t Mailbox::free_large_slot() const {
  for (size_t slot = 0; slot < uses_.size(); ++slot) {
    const Use& use = uses_[slot];
    if (use.peer < 0) return static_cast<int32_t>(slot);
    const Box& to = box(channel_.rank(), use.peer);
    const uint32_t taken = to.taken.load(std::memory_order_acquire);
    const uint32_t put = to.put.load(std::memory_order_relaxed);
    // Whether it is among those that are there, however long ago it was put in.
    if (use.put - taken >= put - taken) return static_cast<int32_t>(slot);
  }
  return kSmall;
}

void Mailbox::start(std::shared_ptr<Message> message) {
  channel_.check_alive();
  ++waiting_;
  message->peer_name = channel_.name_of(message->peer);
  lanes_[2 * message->peer + message->sending].push_back(std::move(message));
  step();
}

bool Mailbox::step() {
  if (waiting_ == 0) return false;
  bool moved = false;
  for (auto& lane : lanes_) {
    while (!lane.empty() && step(*lane.front())) {
      moved = true;
      if (!lane.front()->over) continue;
      lane.front()->keep.reset();
      lane.pop_front();
      --waiting_;
    }
  }
  return moved;
}

// One piece further; false when the other side must act first.
bool Mailbox::step(Message& message) {
  const bool moved = message.sending ? put(message) : take(message);
  if (moved) channel_.ring(message.peer);
  return moved;
}

bool Mailbox::put(Message& message) {
  Box& to = box(channel_.rank(), message.peer);
  const uint32_t put = to.put.load(std::memory_order_relaxed);
  const uint32_t filled = put - to.taken.load(std::memory_order_acquire);
  // There is one header for both slots, so a message starts when the one before it has been taken
  // out.
  if (message.started ? filled >= kSlots : filled != 0) return false;
  if (!message.started) {
    to.header = {message.count, message.tag, {}};
    std::strncpy(to.header.dtype, message.dtype.c_str(), sizeof to.header.dtype - 1);
    message.started = true;
  }
  const int64_t left = message.bytes - message.moved;
  const int32_t large = left > kSmallBytes ? free_large_slot() : kSmall;
  if (large != kSmall) uses_[large] = {message.peer, put};
  to.large[put % kSlots] = large;
  const int64_t piece = std::min(left, large == kSmall ? kSmallBytes : kSlotBytes);
  char* const slot = large == kSmall ? to.small[put % kSlots] : large_slot(channel_.rank(), large);
  if (piece > 0) std::memcpy(slot, message.data + message.moved, piece);
  message.moved += piece;
  message.over = message.moved == message.bytes;
  to.put.store(put + 1, std::memory_order_release);
  return true;
}

bool Mailbox::take(Message& message) {
  Box& from = box(message.peer, channel_.rank());
  const uint32_t taken = from.taken.load(std::memory_order_relaxed);
  if (from.put.load(std::memory_order_acquire) == taken) return false;
  if (!message.started) {
    const Header& sent = from.header;
    if (sent.count != message.count || sent.tag != message.tag || message.dtype != sent.dtype) {
      channel_.fail(
          fmt::format("[shm] the ranks disagree: {} calls {}, {} sent message {}, {} x {}",
                      channel_.text_of(channel_.rank()), message.text(),
                      channel_.text_of(message.peer), sent.tag, sent.dtype, sent.count));
    }
    message.started = true;
  }
  const int32_t large = from.large[taken % kSlots];
  const int64_t piece =
      std::min(message.bytes - message.moved, large == kSmall ? kSmallBytes : kSlotBytes);
  const char* const slot =
      large == kSmall ? from.small[taken % kSlots] : large_slot(message.peer, large);
  if (piece > 0) std::memcpy(message.data + message.moved, slot, piece);
  message.moved += piece;
  message.over = message.moved == message.bytes;
  from.taken.store(taken + 1, std::memory_order_release);
  return true;
}

}  // namespace lockstep::comm

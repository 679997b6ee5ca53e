#include "comm/shm/mailbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace lockstep::comm {
namespace {

constexpr uint32_t kSlots = 2;
constexpr int64_t kSlotBytes = 32 << 10;
// Large slots of a sender, which any of its messages may use. A box for each pair has small ones of
// its own, so that a message gets on whatever the others wait for.
constexpr int kMostLarge = 16;
constexpr int64_t kSmallBytes = 512;
constexpr int32_t kSmall = -1;

int large_slots(int size) { return std::min(kMostLarge, static_cast<int>(kSlots) * (size - 1)); }

}  // namespace

struct Mailbox::Header {
  int64_t count;
  int32_t message;
  char dtype[12];
};

struct Mailbox::Box {
  alignas(128) std::atomic<uint32_t> put;
  alignas(128) std::atomic<uint32_t> taken;
  alignas(128) Header header;  // of the message whose first piece is in the slots
  int32_t large[kSlots];       // which of the sender's large slots holds the piece, or kSmall
  char small[kSlots][kSmallBytes];
};

std::string Parcel::text() const {
  return fmt::format("{} rank {} ({}message {}, {} x {})", sending ? "send to" : "recv from",
                     peer_name, tag.empty() ? "" : tag + ", ", message, dtype, count);
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

// One of this rank's own that nobody has to read any more, or kSmall.
int32_t Mailbox::free_large_slot() const {
  for (size_t slot = 0; slot < uses_.size(); ++slot) {
    const Use& use = uses_[slot];
    if (use.peer < 0) return static_cast<int32_t>(slot);
    const uint32_t taken = box(channel_.rank(), use.peer).taken.load(std::memory_order_acquire);
    if (static_cast<int32_t>(taken - use.put) > 0) return static_cast<int32_t>(slot);
  }
  return kSmall;
}

void Mailbox::start(std::shared_ptr<Parcel> parcel) {
  channel_.check_alive();
  ++waiting_;
  parcel->peer_name = channel_.name_of(parcel->peer);
  lanes_[2 * parcel->peer + parcel->sending].push_back(std::move(parcel));
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
bool Mailbox::step(Parcel& parcel) {
  const bool moved = parcel.sending ? put(parcel) : take(parcel);
  if (moved) channel_.ring(parcel.peer);
  return moved;
}

bool Mailbox::put(Parcel& parcel) {
  Box& to = box(channel_.rank(), parcel.peer);
  const uint32_t put = to.put.load(std::memory_order_relaxed);
  const uint32_t filled = put - to.taken.load(std::memory_order_acquire);
  // There is one header for both slots, so a message starts when the one before it has been taken
  // out.
  if (parcel.started ? filled >= kSlots : filled != 0) return false;
  if (!parcel.started) {
    to.header = {parcel.count, parcel.message, {}};
    std::strncpy(to.header.dtype, parcel.dtype.c_str(), sizeof to.header.dtype - 1);
    parcel.started = true;
  }
  const int64_t left = parcel.bytes - parcel.moved;
  const int32_t large = left > kSmallBytes ? free_large_slot() : kSmall;
  if (large != kSmall) uses_[large] = {parcel.peer, put};
  to.large[put % kSlots] = large;
  const int64_t piece = std::min(left, large == kSmall ? kSmallBytes : kSlotBytes);
  char* const slot = large == kSmall ? to.small[put % kSlots] : large_slot(channel_.rank(), large);
  if (piece > 0) std::memcpy(slot, parcel.data + parcel.moved, piece);
  parcel.moved += piece;
  parcel.over = parcel.moved == parcel.bytes;
  to.put.store(put + 1, std::memory_order_release);
  return true;
}

bool Mailbox::take(Parcel& parcel) {
  Box& from = box(parcel.peer, channel_.rank());
  const uint32_t taken = from.taken.load(std::memory_order_relaxed);
  if (from.put.load(std::memory_order_acquire) == taken) return false;
  if (!parcel.started) {
    const Header& sent = from.header;
    if (sent.count != parcel.count || sent.message != parcel.message ||
        parcel.dtype != sent.dtype) {
      channel_.fail(fmt::format(
          "[shm] the ranks disagree: rank {} calls {}, rank {} sent message {}, {} x {}",
          channel_.name_of(channel_.rank()), parcel.text(), parcel.peer_name, sent.message,
          sent.dtype, sent.count));
    }
    parcel.started = true;
  }
  const int32_t large = from.large[taken % kSlots];
  const int64_t piece =
      std::min(parcel.bytes - parcel.moved, large == kSmall ? kSmallBytes : kSlotBytes);
  const char* const slot =
      large == kSmall ? from.small[taken % kSlots] : large_slot(parcel.peer, large);
  if (piece > 0) std::memcpy(parcel.data + parcel.moved, slot, piece);
  parcel.moved += piece;
  parcel.over = parcel.moved == parcel.bytes;
  from.taken.store(taken + 1, std::memory_order_release);
  return true;
}

}  // namespace lockstep::comm

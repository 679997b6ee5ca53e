// What ranks send each other over TCP: frames of 40 bytes, some followed by a payload. No torch.
#pragma once

#include <bit>
#include <compare>
#include <cstdint>
#include <string>

namespace lockstep::comm {

static_assert(std::endian::native == std::endian::little);

enum class NetKind : uint32_t {
  Eager = 1,  // a message that the receiver may not have asked for yet; payload
  Data,       // a message after its grant; payload
  Offer,      // a message of this many bytes waits for its grant
  Grant,      // there is room for a message of this many bytes
  Credit,     // `bytes` bytes of `part` eager messages have been taken
  Leave,      // the sender has left the group
  Abort,      // the sender has aborted the group; payload: why
  Gone,       // the process of rank `part` has ended
};

// Which message of a group: `number` counts calls, those of all ranks (lane 0) or the messages from
// one rank to another (lane 1).
struct NetKey {
  uint32_t lane = 0;
  uint32_t number = 0;
  uint32_t part = 0;
  auto operator<=>(const NetKey&) const = default;
};

struct NetFrame {
  static constexpr size_t kBytes = 40;
  // Longer messages go in pieces.
  static constexpr int64_t kMostPayload = 1 << 20;
  static constexpr int64_t kMostReason = 4 << 10;
  // Of an eager message.
  static constexpr int64_t kMostEager = 32 << 10;

  NetKind kind = NetKind::Leave;
  uint64_t group = 0;
  NetKey key = {};
  uint32_t checksum = 0;  // of the call
  int64_t bytes = 0;      // of the message

  bool has_payload() const {
    return kind == NetKind::Eager || kind == NetKind::Data || kind == NetKind::Abort;
  }
  std::string packed() const;
  // Of kBytes bytes. Throws Error for what packed() would not have made.
  static NetFrame unpacked(const char* bytes);
};

}  // namespace lockstep::comm

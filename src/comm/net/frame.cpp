#include "comm/net/frame.h"

#include <fmt/format.h>

#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr uint32_t kFrameMagic = 0x4C530100;  // and the kind

template <class T>
void put(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
void take(const char*& from, T& value) {
  std::memcpy(&value, from, sizeof value);
  from += sizeof value;
}

int64_t most_bytes(NetKind kind) {
  switch (kind) {
    case NetKind::Eager:
      return NetFrame::kMostEager;
    case NetKind::Data:
    case NetKind::Offer:
    case NetKind::Grant:
      return NetFrame::kMostPayload;
    case NetKind::Abort:
      return NetFrame::kMostReason;
    default:
      return int64_t{1} << 40;
  }
}

}  // namespace

std::string NetFrame::packed() const {
  std::string text;
  text.reserve(kBytes);
  put(text, kFrameMagic | static_cast<uint32_t>(kind));
  put(text, checksum);
  put(text, group);
  put(text, key.lane);
  put(text, key.number);
  put(text, key.part);
  put(text, uint32_t{0});
  put(text, bytes);
  return text;
}

NetFrame NetFrame::unpacked(const char* from) {
  NetFrame frame;
  uint32_t magic = 0, nothing = 0;
  take(from, magic);
  take(from, frame.checksum);
  take(from, frame.group);
  take(from, frame.key.lane);
  take(from, frame.key.number);
  take(from, frame.key.part);
  take(from, nothing);
  take(from, frame.bytes);
  const uint32_t kind = magic ^ kFrameMagic;
  if (kind < 1 || kind > static_cast<uint32_t>(NetKind::Gone) || nothing != 0) {
    throw Error("no frame of this protocol");
  }
  frame.kind = static_cast<NetKind>(kind);
  if (frame.key.lane > 1 || frame.bytes < 0 || frame.bytes > most_bytes(frame.kind)) {
    throw Error(fmt::format("a frame of kind {} for {} bytes", kind, frame.bytes));
  }
  return frame;
}

}  // namespace lockstep::comm

// Messages as bytes.
#pragma once

#include <string>
#include <string_view>

#include "launch/rendezvous/network/message.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {

// A message that is not of this version of the launchers' protocol.
class ProtocolError : public Error {
 public:
  using Error::Error;
};

// The longest message, which is the order of 60,000 hosts.
constexpr size_t kMostBytes = 1 << 18;

// A byte for the kind, then its fields in the order of message.h: numbers as LEB128, signed ones
// folded (zigzag), texts and lists after their length, an optional after 0 or 1. Texts longer than
// 4000 bytes are cut.
std::string encode(const Message& message);

// The opposite, for any bytes. Throws ProtocolError for anything that encode() would not have
// written.
Message decode(std::string_view bytes);

}  // namespace lockstep::launch

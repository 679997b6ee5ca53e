// Any bytes on the rendezvous port, before and after the token has been proved, and as a message:
// each is refused with a ProtocolError or means one thing only.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "launch/rendezvous/network/secure_channel.h"

namespace {

using namespace lockstep::launch;
using Side = SecureChannel::Side;

Keys keys(bool tls) {
  static const lockstep::Token token("a token of the fuzzer's");
  Keys keys = Keys::of(token, "fuzz");
  keys.use_tls = tls;
  return keys;
}

void feed_stranger(Side side, bool tls, std::string_view bytes) {
  SecureChannel channel(side, keys(tls));
  for (size_t at = 0; at < bytes.size(); at += 64) channel.feed(bytes.substr(at, 64));
  if (channel.is_open()) std::abort();  // nobody guesses a proof
}

// One who has the token, and then says anything.
void feed_member(std::string_view bytes) {
  SecureChannel caller(Side::Caller, keys(false)), called(Side::Called, keys(false));
  for (int round = 0; round < 3; ++round) {
    called.feed(caller.take_output());
    caller.feed(called.take_output());
  }
  if (!called.is_open()) std::abort();
  called.feed(bytes);
  if (!called.take_messages().empty()) std::abort();  // without a code that only members can make
}

void read_message(std::string_view bytes) {
  const Message message = decode(bytes);
  if (encode(message) != bytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    switch (data[0] % 8) {
      case 0:
        feed_stranger(Side::Called, false, bytes);
        break;
      case 1:
        feed_stranger(Side::Caller, false, bytes);
        break;
      case 2:
        feed_stranger(Side::Called, true, bytes);
        break;
      case 3:
        feed_member(bytes);
        break;
      default:
        read_message(bytes);
    }
  } catch (const ProtocolError&) {
  }
  return 0;
}

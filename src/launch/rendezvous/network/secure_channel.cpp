#include "launch/rendezvous/network/secure_channel.h"

#include <fmt/format.h>

#include <utility>

#include "core/security/tls.h"

namespace lockstep::launch {
namespace {

constexpr std::string_view kMagic = "LOCKSTEP";
constexpr size_t kNonce = 32, kProof = 32, kTag = 16;
constexpr size_t kGreeting = kMagic.size() + 2 + kNonce;

std::string big_endian(uint64_t value, int bytes) {
  std::string text;
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8)
    text += static_cast<char>(value >> shift);
  return text;
}

uint64_t number_of(std::string_view bytes) {
  uint64_t value = 0;
  for (const char byte : bytes) value = value << 8 | static_cast<uint8_t>(byte);
  return value;
}

// For a log line: what is not printable as \x00.
std::string quoted(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes.substr(0, 24)) {
    const auto code = static_cast<uint8_t>(byte);
    text += code >= 0x20 && code < 0x7F ? std::string(1, byte) : fmt::format("\\x{:02x}", code);
  }
  return text;
}

}  // namespace

Keys Keys::of(const Token& token, std::string_view run_id) {
  return {token.key("proof", run_id), token.key("tls", run_id), token.key("ranks", run_id)};
}

SecureChannel::SecureChannel(Side side, const Keys& keys, uint16_t version)
    : side_(side),
      keys_(keys),
      version_(version),
      state_(side == Side::Caller ? State::Challenge : State::Hello),
      nonce_(text_of(random_bytes())) {
  if (keys.use_tls) {
    tls_ = std::make_unique<Tls>(side == Side::Caller ? Tls::Role::Client : Tls::Role::Server,
                                 keys.tls);
  }
  if (side == Side::Caller) {
    write(fmt::format("{}{}{}", kMagic, big_endian(version_, 2), nonce_));
  }
}

SecureChannel::~SecureChannel() = default;
SecureChannel::SecureChannel(SecureChannel&&) noexcept = default;

void SecureChannel::fail(const std::string& what) {
  state_ = State::Failed;
  throw ProtocolError("[rendezvous] " + what);
}

void SecureChannel::write(std::string_view plain) {
  if (tls_) {
    tls_->write(plain);
  } else {
    output_ += plain;
  }
}

std::string SecureChannel::take_output() {
  if (tls_) output_ += tls_->take_output();
  return std::exchange(output_, {});
}

void SecureChannel::feed(std::string_view bytes) {
  if (state_ == State::Failed) return;
  if (tls_) {
    try {
      input_ += tls_->feed(bytes);
    } catch (const TlsError& error) {
      throw ProtocolError(
          fmt::format("[rendezvous] {}: do both launchers have --tls (or --rdzv-conf tls=1) and "
                      "the same token?",
                      error.what()));
    }
  } else {
    input_ += bytes;
  }
  read();
  input_.erase(0, std::exchange(used_, 0));
}

void SecureChannel::read() {
  for (;;) {
    if (state_ == State::Hello || state_ == State::Challenge) {
      const std::string_view begin = std::string_view(input_).substr(used_, kMagic.size());
      if (begin != kMagic.substr(0, begin.size())) {
        constexpr char kTlsHandshake = 0x16;  // the type of the first record
        const bool is_tls = !tls_ && begin.front() == kTlsHandshake;
        fail(fmt::format("a program that is not a launcher sent '{}'{}", quoted(begin),
                         is_tls ? ", as TLS begins: give --tls (or --rdzv-conf tls=1) to the "
                                  "launchers of all hosts, or to none"
                                : ""));
      }
      const auto greeting = take(kGreeting);
      if (!greeting) return;
      on_greeting(*greeting);
    } else if (state_ == State::Proof || state_ == State::Confirmation) {
      const auto proof = take(kProof);
      if (!proof) return;
      on_proof(*proof);
    } else if (!read_message()) {
      return;
    }
  }
}

std::optional<std::string_view> SecureChannel::take(size_t count) {
  if (input_.size() - used_ < count) return std::nullopt;
  return std::string_view(input_).substr(std::exchange(used_, used_ + count), count);
}

void SecureChannel::on_greeting(std::string_view bytes) {
  const auto version = static_cast<uint16_t>(number_of(bytes.substr(kMagic.size(), 2)));
  peer_nonce_ = bytes.substr(kMagic.size() + 2);
  // Even to one of another version, so that both can report the reason.
  if (side_ == Side::Called) {
    write(fmt::format("{}{}{}", kMagic, big_endian(version_, 2), nonce_));
  }
  if (version != version_) {
    fail(
        fmt::format("the other launcher speaks version {} of the protocol, this one version {}: "
                    "install the same lockstep on every host",
                    version, version_));
  }
  if (side_ == Side::Called) {
    state_ = State::Proof;
  } else {
    write(text_of(proof_of(Side::Caller)));
    state_ = State::Confirmation;
  }
}

// With both nonces in their order, so that no proof can be replayed in another channel, or by the
// other side.
Digest SecureChannel::proof_of(Side side) const {
  const bool own = side_ == Side::Caller;
  return hmac(text_of(keys_.proof), {side == Side::Caller ? "caller" : "called",
                                     own ? nonce_ : peer_nonce_, own ? peer_nonce_ : nonce_});
}

void SecureChannel::on_proof(std::string_view bytes) {
  const Side peer = side_ == Side::Caller ? Side::Called : Side::Caller;
  if (!is_same(bytes, text_of(proof_of(peer)))) {
    fail("the other launcher does not know this job's token, or has another --rdzv-id");
  }
  if (side_ == Side::Called) write(text_of(proof_of(Side::Called)));
  open();
}

void SecureChannel::open() {
  const Digest session = hmac(text_of(keys_.proof), {"session", text_of(proof_of(Side::Caller))});
  const Digest call = hmac(text_of(session), {"from the caller"});
  const Digest answer = hmac(text_of(session), {"from the called"});
  sending_ = side_ == Side::Caller ? call : answer;
  receiving_ = side_ == Side::Caller ? answer : call;
  state_ = State::Open;
}

// Four bytes of length, the message, and the first half of an HMAC over its number and itself: a
// message that is changed, repeated or left out ends the channel.
void SecureChannel::send(std::string_view bytes) {
  const Digest tag = hmac(text_of(sending_), {big_endian(sent_++, 8), bytes});
  write(big_endian(bytes.size(), 4));
  write(bytes);
  write(text_of(tag).substr(0, kTag));
}

bool SecureChannel::read_message() {
  const std::string_view rest = std::string_view(input_).substr(used_);
  if (rest.size() < 4) return false;
  const uint64_t length = number_of(rest.substr(0, 4));
  if (length > kMostBytes)
    fail(fmt::format("a message of {} bytes, {} are the most", length, kMostBytes));
  const auto all = take(4 + length + kTag);
  if (!all) return false;
  const std::string_view bytes = all->substr(4, length);
  const Digest tag = hmac(text_of(receiving_), {big_endian(received_++, 8), bytes});
  if (!is_same(all->substr(4 + length), text_of(tag).substr(0, kTag))) {
    fail("a message was changed on its way");
  }
  try {
    messages_.push_back(std::make_shared<const Message>(decode(bytes)));
  } catch (const ProtocolError&) {
    state_ = State::Failed;
    throw;
  }
  return true;
}

}  // namespace lockstep::launch

#include "comm/net/handshake.h"

#include <cstring>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// A TLS record's type, version and length.
constexpr size_t kHeader = 5;
// RFC 8446, 5.2.
constexpr size_t kMostRecord = (1 << 14) + 256;

// The sender's and the receiver's rank.
struct Name {
  NetPayload payload = NetPayload::Plain;
  int32_t from = 0;
  int32_t to = 0;
};

std::string packed(const Name& name) { return {reinterpret_cast<const char*>(&name), sizeof name}; }

}  // namespace

NetHandshake::NetHandshake(Tls::Role role, const Digest& key, int rank, std::optional<int> peer,
                           NetPayload payload)
    : tls_(role, key),
      is_caller_(role == Tls::Role::Client),
      payload_(payload),
      rank_(rank),
      peer_(peer),
      wants_(kHeader) {
  if (is_caller_) tls_.write(packed({.payload = payload_, .from = rank_, .to = *peer_}));
}

NetHandshake NetHandshake::caller(const Digest& key, int rank, int peer, NetPayload payload) {
  return NetHandshake(Tls::Role::Client, key, rank, peer, payload);
}

NetHandshake NetHandshake::called(const Digest& key, int rank, NetPayload payload) {
  return NetHandshake(Tls::Role::Server, key, rank, std::nullopt, payload);
}

// Record by record, so that nothing after the last is taken for a part of it.
void NetHandshake::feed(std::string_view bytes) {
  record_ += bytes;
  if (bytes.size() < wants_) {
    wants_ -= bytes.size();
    return;
  }
  if (record_.size() == kHeader) {
    wants_ = static_cast<uint8_t>(record_[3]) << 8 | static_cast<uint8_t>(record_[4]);
    if (wants_ == 0 || wants_ > kMostRecord) throw TlsError("no TLS record");
    return;
  }
  wants_ = kHeader;
  const std::string plain = tls_.feed(record_);
  record_.clear();
  hear(plain);
}

void NetHandshake::hear(std::string_view plain) {
  heard_ += plain;
  Name name;
  if (heard_.size() < sizeof name) return;
  std::memcpy(&name, heard_.data(), sizeof name);
  if (heard_.size() > sizeof name || name.payload != payload_ || name.to != rank_ ||
      (peer_ && name.from != *peer_)) {
    throw Error("another rank than the one expected");
  }
  peer_ = name.from;
  if (!is_caller_) tls_.write(packed({.payload = payload_, .from = rank_, .to = *peer_}));
  wants_ = 0;
}

std::string NetHandshake::take_output() { return tls_.take_output(); }

std::optional<Tls> NetHandshake::take_channel() {
  if (payload_ == NetPayload::Plain) return std::nullopt;
  return std::move(tls_);
}

}  // namespace lockstep::comm

// A collective or a message under way over TCP. No torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace lockstep::comm {

// Why a call failed, in words that follow the name of `peer` (of the group), if there is one.
struct NetFailure {
  std::string what;
  int peer = -1;
  // Another rank made a different call: the others' notices may say which.
  bool contradicts = false;
};

// A message of `sent` bytes where there is room for another number.
NetFailure too_many(int from, int64_t sent, int64_t room);
NetFailure too_little(int to, int64_t room, int64_t sent);

// Which call of a group, and what all its ranks must agree on.
struct NetCallName {
  enum class Kind : uint8_t { All, Send, Recv };
  Kind kind = Kind::All;
  int peer = -1;  // of a message
  uint32_t number = 0;
  uint32_t checksum = 0;
  // Its messages, even short ones, are over only when the receiver has begun the call. The same on
  // all ranks.
  bool meets = false;
};

class NetJob : public std::enable_shared_from_this<NetJob> {
 public:
  explicit NetJob(const NetCallName& name) : name_(name) {}
  // Any thread may call it.
  bool is_over() const { return over_.load(std::memory_order_acquire); }
  // Once it is over.
  const std::optional<NetFailure>& failure() const { return failure_; }
  const NetCallName& name() const { return name_; }

 private:
  friend class NetBox;
  const NetCallName name_;
  int pending_ = 0;  // messages
  std::atomic<bool> over_ = false;
  std::optional<NetFailure> failure_;
};

}  // namespace lockstep::comm

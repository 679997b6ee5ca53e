// The messages of torch.distributed's TCPStore (torch 2.1 and later), so that ranks of Python and
// of this library can use one store, which either may serve. Not documented: read off what its
// clients and servers send each other. A message is the byte of its query and its fields; numbers
// are little-endian, a text is its length as uint64 and its bytes.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace lockstep::comm {

static_assert(std::endian::native == std::endian::little);

enum class StoreQuery : uint8_t {
  Validate,     // uint32 kMagic; no answer; the first of every connection
  Set,          // key, value; no answer
  CompareSet,   // key, expected, wanted; text: what the key now has, or `expected` where there is
                // none
  Get,          // key; text
  Add,          // key, int64; int64: the sum, which the key then has as decimal text. StoreServer's
                // answer is kNoNumber where the value is not a number, and stays, or the store is
                // full, of which a Ping tells
  Check,        // uint64 count, keys; byte kReady or kNotReady
  Wait,         // uint64 count, keys; byte kStopWaiting, once all are there
  CountKeys,    // int64
  Delete,       // key; int64: how many were deleted
  Append,       // key, value; no answer
  MultiGet,     // uint64 count, keys; as many texts. StoreServer's answer comes once all are there
  MultiSet,     // uint64 count, keys each with its value; no answer
  CancelWait,   // byte kWaitCancelled; for the Wait before it there may be kStopWaiting before that
  Ping,         // uint32; the same uint32. StoreServer's answer is its complement after a request
                // for which the store was too full
  Push,         // key, value; no answer
  Pop,          // key; int64 0 or 1, and then the oldest value as text
  QueueLength,  // key; int64
  ListKeys,     // int64 count; as many texts
  Barrier,      // key, int64 count; as Add of 1, and then as a Wait until the sum is that
};

constexpr uint32_t kMagic = 0x3C85F7CE;
constexpr int64_t kNoNumber = std::numeric_limits<int64_t>::min();
constexpr char kReady = 0, kNotReady = 1;
constexpr char kStopWaiting = 0, kWaitCancelled = 1;
// Under which every client counts itself, for a server that waits for them.
constexpr std::string_view kArrivals = "init/";
// How many ranks are making a group, or are expected to: see Store::Making.
constexpr std::string_view kMaking = "lockstep/making";
// The prefix of all keys of KeyValueStore.
constexpr std::string_view kUsers = "/";

// Larger than any real value: the bytes of another protocol are not taken for a length.
constexpr uint64_t kMostText = uint64_t{64} << 20;
// The answer of a server with the job's secret to a client that begins without TLS: no client sends
// it as a ping.
constexpr uint32_t kNeedsKey = 0x4B45594E;

// What is to be sent, field by field.
class StoreMessage {
 public:
  StoreMessage() = default;
  explicit StoreMessage(StoreQuery query) : bytes_(1, static_cast<char>(query)) {}

  template <class T>
  requires std::is_arithmetic_v<T> StoreMessage& number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  StoreMessage& text(std::string_view value) {
    number<uint64_t>(value.size());
    bytes_.append(value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

struct StoreRequest {
  StoreQuery query;
  std::vector<std::string> texts;  // keys and values, in the order above
  int64_t number = 0;              // the magic, what to add, the ping, the barrier's count
};

// Cuts the first request off `in`; nothing when its end is not there yet. Throws Error when it is
// none: an unknown query, or a length that no client would send.
std::optional<StoreRequest> take_request(std::string_view& in);

}  // namespace lockstep::comm

// One connection to a key-value store: StoreServer's, or that of torch.distributed's TCPStore.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "comm/store_protocol.h"
#include "core/fd.h"

namespace lockstep::comm {

// Why a call failed, in words that end a sentence.
class StoreFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a call waited for is not going to come: why.
class StoreGivenUp : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Any thread may call; a call that waits holds up those of other threads. No call looks up the name
// of an address, and none takes longer than its deadline and a second: a server that is stopped, or
// whose host is cut off, must not keep its clients. All throw StoreFailure, and StoreGivenUp where
// they are told. A connection on which an answer failed to come stays closed.
class StoreClient {
 public:
  using Clock = std::chrono::steady_clock;
  using Deadline = Clock::time_point;
  // Asked by calls that wait, every 50 ms: why that is in vain, if it is. From then on a server has
  // 0.1 s for each answer, as it needs at most to keep what it is told.
  using Heed = std::function<std::optional<std::string>()>;

  // Tries until somebody answers there. A name is looked up anew each time.
  StoreClient(const std::string& host, int port, Deadline deadline, Heed heed = {});

  void set(std::string_view key, std::string_view value, Deadline deadline);
  void append(std::string_view key, std::string_view value, Deadline deadline);
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view wanted,
                          Deadline deadline);
  // The values, which must be there: after wait().
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline);
  void wait(const std::vector<std::string>& keys, Deadline deadline);
  bool check(const std::vector<std::string>& keys, Deadline deadline);
  int64_t add(std::string_view key, int64_t amount, Deadline deadline);
  bool erase(std::string_view key, Deadline deadline);
  int64_t count_keys(Deadline deadline);

 private:
  class Call;

  const Heed heed_;
  Fd fd_;
  std::mutex mutex_;
  std::condition_variable free_;
  bool busy_ = false;  // with a call
};

}  // namespace lockstep::comm

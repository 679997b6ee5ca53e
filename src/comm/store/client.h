// One connection to a key-value store: StoreServer's, or that of torch.distributed's TCPStore.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/store/connection.h"
#include "comm/store/protocol.h"
#include "core/process/own_process.h"

namespace lockstep::comm {

// Any thread may call; a call that waits holds up those of other threads. No call looks up the name
// of an address, and none takes longer than its deadline and a second: a server that is stopped, or
// whose host is cut off, must not keep its clients. All throw StoreFailure, and StoreGivenUp where
// `Heed` says to stop. A connection on which an answer failed to come is closed, and the next call
// makes another; where the server has closed it, all further calls fail.
class StoreClient {
 public:
  using Clock = StorePatience::Clock;
  using Deadline = StorePatience::Deadline;
  // Asked by calls that wait, every 50 ms: the reason to stop waiting, if there is one. From then
  // on a server has 0.1 s for each answer, as it needs at most to keep what it is told.
  using Heed = StorePatience::Heed;

  // Tries until a server answers there; with a key, one that knows it, over TLS. A name is looked
  // up again each time. With `was_there` a server is known to have run there, so a refused
  // connection is an error at once.
  StoreClient(const std::string& host, int port, Deadline deadline, Heed heed = {},
              std::optional<Digest> key = std::nullopt, bool was_there = false);

  // Does not wait for the server.
  void set(std::string_view key, std::string_view value, Deadline deadline);
  // Returns when the server has it; throws StoreRefusal when it is full.
  void set_confirmed(std::string_view key, std::string_view value, Deadline deadline);
  void append(std::string_view key, std::string_view value, Deadline deadline);
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view wanted,
                          Deadline deadline);
  // The values, which must be there: after wait(). StoreServer waits for those that another client
  // has removed since.
  std::vector<std::string> get(const std::vector<std::string>& keys, Deadline deadline);
  void wait(const std::vector<std::string>& keys, Deadline deadline);
  bool check(const std::vector<std::string>& keys, Deadline deadline);
  // Throws StoreRefusal when the value is not a number, or the store is full.
  int64_t add(std::string_view key, int64_t amount, Deadline deadline);
  bool erase(std::string_view key, Deadline deadline);
  int64_t count_keys(Deadline deadline);

 private:
  class Call;

  const std::string host_;
  const int port_;
  const std::optional<Digest> key_;
  const Heed heed_;
  const OwnProcess process_;
  std::unique_ptr<StoreLine> line_;
  std::mutex mutex_;
  std::condition_variable free_;
  bool busy_ = false;        // with a call
  bool unanswered_ = false;  // why there is no line_
  int cancelled_ = 0;        // waits whose last answers are still to come
};

}  // namespace lockstep::comm

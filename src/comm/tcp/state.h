// What a group over TCP and its operations share: its end of the net, its health, and how a failure
// becomes an error on every rank.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/health/diagnosis.h"
#include "comm/health/end.h"
#include "comm/health/peer_status.h"
#include "comm/net/net.h"
#include "comm/tcp/transport.h"

namespace lockstep::comm {

// One operation under way.
struct TcpStep {
  Notice notice;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  bool looked = false;  // at what the peers have posted
};

class TcpState {
 public:
  TcpState(std::shared_ptr<Net> net, const Store& store, int rank, const TcpOptions& options);

  // Blocks until `job` is over. Throws CommError, and ends the group, when it fails, when the
  // deadline passes, when the launcher reports a dead rank, and when another rank turns out to do
  // something else. False when `until` came first.
  bool await(
      const NetJob& job, TcpStep& step,
      std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max());
  // Ends the group with an error that says what every rank was doing.
  [[noreturn]] void fail(const TcpStep& step, const std::string& reason);
  // Ends the group, with a word for the others. Any thread.
  void give_up(std::string_view why) noexcept;
  // Ends the group without a word posted there.
  void abandon() noexcept;
  // Throws when the group is dead.
  void check_alive() const;
  bool is_dead() const { return end_.is_said(); }
  // Why it is of no use any more, as far as is known here.
  std::optional<std::string> failure();

  int rank() const { return diagnosis_.rank(); }
  int size() const { return diagnosis_.size(); }
  const std::vector<int>& members() const { return diagnosis_.members(); }
  const Store& store() const { return store_; }
  const TcpOptions& options() const { return options_; }
  const std::shared_ptr<Net>& net() const { return net_; }
  NetGroup& group() { return group_; }

 private:
  std::string words(const NetFailure& failure) const;
  void look(TcpStep& step);
  void done(const TcpStep& step);

  const std::shared_ptr<Net> net_;
  const Store store_;
  const Diagnosis diagnosis_;
  const TcpOptions options_;
  PeerStatus peer_status_;
  NetGroup group_;
  End end_;
};

}  // namespace lockstep::comm

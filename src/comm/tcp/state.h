// The state that a group over TCP and its operations share: its health, and its interface to the
// net.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/health/group_health.h"
#include "comm/net/net.h"
#include "comm/tcp/transport.h"

namespace lockstep::comm {

class TcpState final : public GroupHealth {
 public:
  TcpState(std::shared_ptr<Net> net, const Store& store, int rank, const TcpOptions& options);

  // Blocks until `job` is over. Throws CommError, and ends the group, when it fails, when the
  // deadline passes, when the launcher reports a dead rank, and when another rank turns out to do
  // something else. False when `until` came first.
  bool await(
      const NetJob& job, WireOperation& operation,
      std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max());

  const TcpOptions& options() const { return options_; }
  const std::shared_ptr<Net>& net() const { return net_; }
  NetGroup& group() { return group_; }

 private:
  std::string words(const NetFailure& failure) const;
  void abort(const std::string& why) noexcept override { group_.abort(why); }
  void leave() noexcept override { group_.leave(); }

  const std::shared_ptr<Net> net_;
  const TcpOptions options_;
  NetGroup group_;
};

}  // namespace lockstep::comm

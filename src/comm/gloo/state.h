// What a Gloo transport and its operations share: the group, and its health.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/gloo/ops.h"
#include "comm/health/group_health.h"

namespace lockstep::comm {

class GlooState final : public GroupHealth {
 public:
  // `members`: the world's numbers of the group's ranks.
  GlooState(const Store& store, int rank, std::vector<int> members, const GlooOptions& options);
  ~GlooState() override;

  // Blocks until `work` is over. Throws CommError, and ends the group, when it fails, when the
  // deadline passes, when the launcher reports a dead rank, and when another rank turns out to do
  // something else. False when `until` came first.
  bool await(
      const WireWork& work, WireOperation& operation,
      std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max());

  // Ends all operations, here and on every rank that is connected to this one.
  void close() noexcept;

  // Calls that were started, in their order, until they are over or dropped. Any thread.
  struct Started {
    Notice notice;
    std::vector<WireWork> works;
  };
  using Place = std::list<Started>::iterator;
  Place add(Started call);
  void remove(Place call);

  const GlooOptions& options() const { return options_; }
  GlooOps& ops() { return *ops_; }

 private:
  void meet();
  void connect();
  void abort(const std::string&) noexcept override { close(); }
  void leave() noexcept override { close(); }
  // Python ranks post nothing.
  bool peers_post() const override { return options_.peers == GlooPeers::Lockstep; }
  std::optional<Notice> first_under_way() const override;

  const GlooOptions options_;
  std::string address_;
  c10::intrusive_ptr<GlooGroup> group_;
  std::unique_ptr<GlooOps> ops_;
  mutable std::mutex mutex_;
  std::list<Started> started_;
};

}  // namespace lockstep::comm

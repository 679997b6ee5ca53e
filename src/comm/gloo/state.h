// What a Gloo transport and its operations share: the group, its health, and how a failure becomes
// an error on every rank.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/gloo/ops.h"
#include "comm/health/diagnosis.h"
#include "comm/health/end.h"
#include "comm/health/peer_status.h"

namespace lockstep::comm {

// One operation under way.
struct GlooStep {
  Notice notice;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  bool looked = false;  // at what the peers have posted
};

class GlooState {
 public:
  // `members`: the ranks of the group as the world counts them.
  GlooState(const Store& store, int rank, std::vector<int> members, const GlooOptions& options);
  ~GlooState();

  // Blocks until `work` is over. Throws CommError, and ends the group, when it fails, when the
  // deadline passes, when the launcher reports a dead rank, and when another rank turns out to do
  // something else.
  // False when `until` came first.
  bool await(
      const WireWork& work, GlooStep& step,
      std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max());
  // Tells the others that this rank came out of a long operation.
  void done(const GlooStep& step);
  // Ends the group with an error that says what every rank was doing.
  [[noreturn]] void fail(const GlooStep& step, const std::string& reason);
  // Ends the group, with a word for the others. Any thread.
  void give_up(std::string_view why) noexcept;
  // Ends the group without a word, and with it everything under way.
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
  const GlooOptions& options() const { return options_; }
  GlooOps& ops() { return *ops_; }

 private:
  void meet();
  void connect();
  void look(GlooStep& step);
  void break_connections() noexcept;

  const Store store_;
  const Diagnosis diagnosis_;
  const GlooOptions options_;
  PeerStatus peer_status_;
  std::string address_;
  c10::intrusive_ptr<GlooGroup> group_;
  std::unique_ptr<GlooOps> ops_;
  End end_;
};

}  // namespace lockstep::comm

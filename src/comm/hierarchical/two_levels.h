// The transports below host-then-net, and what is under way on them.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/health/diagnosis.h"
#include "comm/health/end.h"
#include "comm/health/group_health.h"
#include "comm/health/peer_status.h"
#include "comm/hierarchical/pipeline.h"
#include "comm/store/store.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

struct TwoLevels {
  // `members` are the world's numbers of the group's ranks.
  TwoLevels(const Store& store, int rank, std::vector<int> members)
      : diagnosis(rank, std::move(members), store.launcher_status()),
        peer_status(store.clone(PeerStatus::kInquiry), rank, diagnosis.members()) {}

  // Over shared memory: the steps before and those after the network, each in its own order.
  std::shared_ptr<Transport> host_reduce, host_broadcast;
  // Over the network: the ranks with this local rank on every host, or null; and all ranks.
  std::shared_ptr<Transport> column, all;
  Pipeline pipeline;
  End end;  // said when all transports have been told
  std::mutex ending;
  // Of the whole group. Ranks in different calls may wait in different transports, none of which
  // sees both.
  const Diagnosis diagnosis;
  PeerStatus peer_status;

  // Runs `call`; what it throws ends the group on all ranks.
  template <class Call>
  auto guarded(const Call& call) -> decltype(call()) {
    if (const auto why = end.why())
      throw CommError(fmt::format("{} (this group has failed, make a new one)", *why));
    try {
      return call();
    } catch (const CommError& error) {
      abort_all(error.what());
      throw;
    }
  }

  // Returns when every transport has its reason, whichever thread gave it: one that is dropped
  // before only says that this rank has left.
  void abort_all(std::string_view why) noexcept;
  // For a call that still waits. Throws CommError when its deadline has passed, and when it turns
  // out that another rank is in a different one.
  void attend(WireOperation& operation);
  // Posts to the others that this rank has left a call in which it had waited long.
  void done(const WireOperation& operation);
  // Takes everything under way further without waiting.
  void move_on();
  // Waits until `wait_within(limit)` is true, and moves on everything else meanwhile: other ranks
  // may wait for that first. False when `until` came first.
  using Clock = std::chrono::steady_clock;
  template <class WaitWithin>
  bool wait(const WaitWithin& wait_within, WireOperation& operation, Clock::time_point until) {
    for (std::chrono::microseconds limit{2000};; limit = std::min(2 * limit, kLongestTurn)) {
      const auto now = Clock::now();
      const auto left = std::chrono::ceil<std::chrono::microseconds>(until - now);
      if (wait_within(std::clamp(left, std::chrono::microseconds(0), limit))) return true;
      operation.excuse(Clock::now() - now, std::chrono::ceil<std::chrono::milliseconds>(limit));
      attend(operation);
      // Also where the wait was shorter than a turn: it may be one of many such.
      move_on();
      if (Clock::now() >= until) return false;
    }
  }
  // A look at the network's work interrupts a wait there by an exception, which has a cost.
  static constexpr std::chrono::microseconds kLongestTurn{16000};
  // How long a rank that reports its deadline waits for those that came later to reach theirs.
  static constexpr std::chrono::milliseconds kHearsay{1000};
};

// An operation that lets all others of the group progress while it waits.
class LevelsWork : public Pending {
 protected:
  using Clock = TwoLevels::Clock;
  LevelsWork(std::shared_ptr<TwoLevels> levels, WireOperation operation)
      : levels_(std::move(levels)), operation_(std::move(operation)) {}
  // False when `until` came first.
  virtual bool wait_until(Clock::time_point until) = 0;
  // After everything was taken further.
  virtual bool is_over() = 0;

  const std::shared_ptr<TwoLevels> levels_;
  WireOperation operation_;

 private:
  void finish() override { finish_until(Clock::time_point::max()); }
  bool finish_within(std::chrono::microseconds limit) override {
    return finish_until(Clock::now() + limit);
  }
  bool finish_until(Clock::time_point until);
  bool advance() override;
};

// An operation of one of the transports alone; its failure ends the others, too.
class OneLevelWork : public LevelsWork {
 public:
  OneLevelWork(std::shared_ptr<TwoLevels> levels, WireOperation operation, Work work)
      : LevelsWork(std::move(levels), std::move(operation)), work_(std::move(work)) {}

 private:
  bool wait_until(Clock::time_point until) override;
  bool is_over() override { return work_.is_completed(); }

  Work work_;
};

class TwoLevelWork : public LevelsWork {
 public:
  using Chunks = std::vector<std::shared_ptr<Pipeline::Chunk>>;
  TwoLevelWork(std::shared_ptr<TwoLevels> levels, WireOperation operation, Chunks chunks)
      : LevelsWork(std::move(levels), std::move(operation)), chunks_(std::move(chunks)) {}

 private:
  bool wait_until(Clock::time_point until) override;
  bool is_over() override;

  Chunks chunks_;
};

// An operation that failed while it was started: wait() throws the reason.
class FailedWork : public Pending {
 public:
  explicit FailedWork(std::exception_ptr why) : why_(std::move(why)) {}

 private:
  void finish() override { std::rethrow_exception(why_); }
  bool finish_within(std::chrono::microseconds) override { std::rethrow_exception(why_); }
  bool advance() override { return true; }

  const std::exception_ptr why_;
};

}  // namespace lockstep::comm

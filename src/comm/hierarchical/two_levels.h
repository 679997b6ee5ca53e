// The transports below host-then-net, and what is under way on them.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "comm/health/end.h"
#include "comm/hierarchical/pipeline.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

struct TwoLevels {
  // Over shared memory: the steps before and those after the network, each in its own order.
  std::shared_ptr<Transport> host_reduce, host_broadcast;
  // Over the network: the ranks with this local rank on every host, or null; and all ranks.
  std::shared_ptr<Transport> column, all;
  Pipeline pipeline;
  End end;  // said when all transports have been told
  std::mutex ending;

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
  // Takes everything under way further without waiting.
  void move_on();
  // Waits until `wait_within(limit)` is true, and moves on everything else meanwhile: other ranks
  // may wait for that first. False when `until` came first.
  using Clock = std::chrono::steady_clock;
  template <class WaitWithin>
  bool wait(const WaitWithin& wait_within, Clock::time_point until) {
    for (std::chrono::microseconds limit{2000};; limit = std::min(2 * limit, kLongestTurn)) {
      const auto left = std::chrono::ceil<std::chrono::microseconds>(until - Clock::now());
      if (wait_within(std::clamp(left, std::chrono::microseconds(0), limit))) return true;
      if (Clock::now() >= until) return false;
      move_on();
    }
  }
  // A look at the network's work interrupts a wait there by an exception, which has a cost.
  static constexpr std::chrono::microseconds kLongestTurn{16000};
};

// An operation that lets all others of the group progress while it waits.
class LevelsWork : public Pending {
 protected:
  using Clock = TwoLevels::Clock;
  explicit LevelsWork(std::shared_ptr<TwoLevels> levels) : levels_(std::move(levels)) {}
  // False when `until` came first.
  virtual bool finish_until(Clock::time_point until) = 0;

  const std::shared_ptr<TwoLevels> levels_;

 private:
  void finish() override { finish_until(Clock::time_point::max()); }
  bool finish_within(std::chrono::microseconds limit) override {
    return finish_until(Clock::now() + limit);
  }
};

// An operation of one of the transports alone; its failure ends the others, too.
class OneLevelWork : public LevelsWork {
 public:
  OneLevelWork(std::shared_ptr<TwoLevels> levels, Work work)
      : LevelsWork(std::move(levels)), work_(std::move(work)) {}

 private:
  bool finish_until(Clock::time_point until) override;
  bool advance() override;

  Work work_;
};

class TwoLevelWork : public LevelsWork {
 public:
  using Chunks = std::vector<std::shared_ptr<Pipeline::Chunk>>;
  TwoLevelWork(std::shared_ptr<TwoLevels> levels, Chunks chunks)
      : LevelsWork(std::move(levels)), chunks_(std::move(chunks)) {}

 private:
  bool finish_until(Clock::time_point until) override;
  bool advance() override;

  Chunks chunks_;
};

}  // namespace lockstep::comm

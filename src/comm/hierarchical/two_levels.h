// The transports below host-then-net, and what is under way on them.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/hierarchical/pipeline.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

struct TwoLevels {
  // Over shared memory: the steps before and those after the network, each in its own order.
  std::shared_ptr<Transport> up, down;
  // The same local rank on every host, or nothing; and everybody. Over the network.
  std::shared_ptr<Transport> column, all;
  Pipeline pipeline;
  std::optional<std::string> dead;

  // Runs `call`; what it throws ends the group on all ranks.
  template <class Call>
  auto guarded(const Call& call) -> decltype(call()) {
    if (dead) throw CommError(fmt::format("{} (the group is dead since then)", *dead));
    try {
      return call();
    } catch (const CommError& error) {
      give_up(error.what());
      throw;
    }
  }

  void give_up(std::string_view why) noexcept;
  // Takes everything under way further without waiting.
  void move_on();
  // Waits until `wait_within(limit)` is true, and moves on everything else meanwhile: other ranks
  // may wait for that first.
  template <class WaitWithin>
  void wait(const WaitWithin& wait_within) {
    for (std::chrono::milliseconds limit{2}; !wait_within(limit);
         limit = std::min(2 * limit, kLongestTurn))
      move_on();
  }
  // Looking at the network's work ends a wait there with an exception, which is not for nothing.
  static constexpr std::chrono::milliseconds kLongestTurn{16};
};

// An operation of one of the transports alone; its failure ends the others, too.
class OneLevelWork : public Pending {
 public:
  OneLevelWork(std::shared_ptr<TwoLevels> levels, Work work)
      : levels_(std::move(levels)), work_(std::move(work)) {}

 private:
  void finish() override;
  bool advance() override;

  const std::shared_ptr<TwoLevels> levels_;
  Work work_;
};

class TwoLevelWork : public Pending {
 public:
  using Chunks = std::vector<std::shared_ptr<Pipeline::Chunk>>;
  TwoLevelWork(std::shared_ptr<TwoLevels> levels, Chunks chunks)
      : levels_(std::move(levels)), chunks_(std::move(chunks)) {}

 private:
  void finish() override;
  bool advance() override;

  const std::shared_ptr<TwoLevels> levels_;
  Chunks chunks_;
};

}  // namespace lockstep::comm

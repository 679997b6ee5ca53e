// What the transports that exchange messages know of their group: whether it is alive, and how a
// failure becomes an error on every rank.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/health/diagnosis.h"
#include "comm/health/end.h"
#include "comm/health/peer_status.h"
#include "comm/store/store.h"
#include "core/time_limit.h"

namespace lockstep::comm {

// One operation under way.
struct WireOperation {
  Notice notice;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  // When it is compared with what the peers wait for, again and again.
  std::chrono::steady_clock::duration next_look = PeerStatus::kLongWait;

  std::chrono::steady_clock::duration spent() const {
    return std::chrono::steady_clock::now() - start;
  }
  // After a wait that took so long: gives back the time for which this process was stopped.
  void excuse(std::chrono::steady_clock::duration took, std::chrono::milliseconds most) {
    start += standstill(took, most);
  }
  // Until the deadline.
  std::chrono::milliseconds left() const;
  // Whether to compare it now: less often the longer it waits.
  bool is_due();
  // Whether it has been compared.
  bool has_looked() const { return next_look > PeerStatus::kLongWait; }
};

class GroupHealth {
 public:
  virtual ~GroupHealth() = default;

  // Ends the group with an error that says what every rank was doing.
  [[noreturn]] void fail(const WireOperation& operation, const std::string& reason);
  // Ends the group and reports the reason to the other ranks. Any thread.
  void abort_all(std::string_view why) noexcept;
  // Ends the group, and with it everything under way, without a report to the other ranks.
  void abandon() noexcept;
  // Posts to the others that this rank has left a long operation.
  void done(const WireOperation& operation);
  // Throws when the group has failed.
  void check_alive() const;
  bool is_dead() const { return end_.is_said(); }
  // Whether a wait for the operation, which is not over, would throw at once.
  bool has_failed(const WireOperation& operation) const {
    return is_dead() || operation.left().count() == 0 || diagnosis_.launcher_reports();
  }
  // Why the group can no longer be used, as far as this rank knows.
  std::optional<std::string> failure();

  int rank() const { return diagnosis_.rank(); }
  int size() const { return diagnosis_.size(); }
  const std::vector<int>& members() const { return diagnosis_.members(); }
  const Store& store() const { return store_; }

 protected:
  // How often a wait looks at the launcher's status.
  static constexpr std::chrono::milliseconds kSlice{50};

  // `transport` is what errors begin with; `members` are the world's numbers of the group's ranks.
  GroupHealth(std::string_view transport, const Store& store, int rank, std::vector<int> members);

  // For a wait that continues, once a slice. Throws CommError, and ends the group, when the
  // deadline has passed, when the launcher reports a dead rank, and when another rank turns out to
  // do something else.
  void attend(WireOperation& operation);
  const Diagnosis& diagnosis() const { return diagnosis_; }

 private:
  // Ends all that is under way, here and on every other rank.
  virtual void abort(const std::string& why) noexcept = 0;
  // As abort(), when the group is destroyed.
  virtual void leave() noexcept = 0;
  // Whether the other ranks post their status, too.
  virtual bool peers_post() const { return true; }
  // The first call that was started and is not over, where the transport knows: a rank may wait for
  // a later one.
  virtual std::optional<Notice> first_under_way() const { return std::nullopt; }
  void look(WireOperation& operation);
  void compare(const WireOperation& operation);

  const std::string transport_;
  const Store store_;
  const Diagnosis diagnosis_;
  PeerStatus peer_status_;
  End end_;
};

}  // namespace lockstep::comm

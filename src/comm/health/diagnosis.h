// The ranks of a group, and what is known of each of them after a failure.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/health/launcher_status.h"
#include "comm/health/peer_status.h"

namespace lockstep::comm {

// Any thread may call it.
class Diagnosis {
 public:
  // `members`: the world's numbers of the group's ranks.
  Diagnosis(int rank, std::vector<int> members,
            std::shared_ptr<const LauncherStatus> launcher_status);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }

  // Whether the launcher has reported a failure.
  bool launcher_reports() const { return launcher_status_->has_reported(); }
  // "was aborted (rank 3 was killed by SIGKILL)".
  std::string abort_text() const { return launcher_status_->abort_text(); }
  // How a rank of this host ended: "was killed by SIGKILL"; nothing while it runs.
  std::optional<std::string> fate(int rank) const { return launcher_status_->fate(members_[rank]); }
  // "rank 1 (rank 3 of the world)".
  std::string name(int rank) const {
    return rank_text(rank, launcher_status_->number_of(members_[rank]));
  }
  // How this rank's call `mine` ended, with what each of the others is doing. The cause is the
  // launcher's explanation, where it has given one by now, or else what was `seen`, perhaps its
  // consequence.
  std::string end(const Notice& mine, const std::string& seen,
                  const PeerStatus::Notices& notices) const;

 private:
  // The advice (CallOptions::advice) of this rank's call, or of another's, for ranks that have
  // diverged.
  std::string advice(const Notice& mine, const PeerStatus::Notices& notices) const;
  // That the store has not answered this rank, or could not be asked.
  std::string silent_store() const;
  std::string others(const Notice& mine, const std::string& seen,
                     const PeerStatus::Notices& notices) const;

  const int rank_;
  const std::vector<int> members_;
  const std::shared_ptr<const LauncherStatus> launcher_status_;
};

}  // namespace lockstep::comm

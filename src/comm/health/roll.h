// Who the ranks of a group are, and what is known of them when something has gone wrong.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/health/board.h"
#include "comm/health/verdict.h"

namespace lockstep::comm {

// Any thread may ask.
class Roll {
 public:
  // `members`: the ranks of the group as the world counts them.
  Roll(int rank, std::vector<int> members, std::shared_ptr<const Verdict> verdict);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }

  // Whether the launcher has reported a failure.
  bool launcher_reports() const { return verdict_->is_out(); }
  // "was given up (rank 3 was killed by SIGKILL)".
  std::string given_up() const { return verdict_->given_up(); }
  // How a rank of this host ended: "was killed by SIGKILL"; nothing while it runs.
  std::optional<std::string> fate(int rank) const { return verdict_->fate(members_[rank]); }
  // "rank 1 (rank 3 of the world)".
  std::string name(int rank) const;
  // How this rank's call `mine` ended, with what each of the others is doing. The cause is the
  // launcher's word, where it has given one by now, or else what was `seen`, perhaps its echo.
  std::string end(const Notice& mine, const std::string& seen, const Board::Notices& notices) const;

 private:
  // What a call of this rank, or of another, advises for the case that the ranks have come apart.
  std::string advice(const Notice& mine, const Board::Notices& notices) const;
  std::string others(const Notice& mine, const Board::Notices& notices) const;

  const int rank_;
  const std::vector<int> members_;
  const std::shared_ptr<const Verdict> verdict_;
};

}  // namespace lockstep::comm

// Whether the launcher has reported a failure of the job, and why.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/control.h"

namespace lockstep::comm {

// What messages call rank `rank` of a group, whose number in the world is `number`: "rank 1", or
// "rank 1 (process 7, rank 3 of the world)" with `more` and where they differ.
std::string rank_text(int rank, int number, std::string more = {});

// Any thread may call it.
class LauncherStatus {
 public:
  // The ranks that a group numbers from 0, by their numbers in the job; of them this process is
  // `own`.
  struct Numbers {
    std::vector<int> of_job;
    int own = 0;
  };

  // Throws ConfigError, as Control does. `numbers`: of a group that need not be the job; how ranks
  // ended is known only if they are the launcher's numbers.
  explicit LauncherStatus(std::optional<Numbers> numbers = std::nullopt);

  // Whether a group has told them.
  bool has_numbers() const { return !numbers_.empty(); }
  // The number in the job of a rank of the world, or of such a group.
  int number_of(int rank) const { return numbers_.empty() ? rank : numbers_.at(rank); }

  // Whether there is a launcher that reports failures.
  bool has_launcher() const { return control_.has_value(); }
  // Whether a failure has been reported: then this process is about to be stopped.
  bool has_reported() const { return control_ && control_->failures() != 0; }
  // "was aborted (rank 3 on host2 was killed by SIGKILL)".
  std::string abort_text() const;
  // Whether it has reported more than how this host's ranks ended.
  bool is_explained() const { return has_reported() && !control_->reason().empty(); }
  // The same with how this host's ranks ended, for messages that do not name it otherwise: "was
  // aborted (rank 1 was killed by SIGKILL)".
  std::string abort_text_with_ends() const;
  // How this rank of the world, or of such a group, ended, if it is of this host: "was killed by
  // SIGKILL"; nothing while it runs.
  std::optional<std::string> fate(int rank) const;

 private:
  const std::optional<Control> control_;
  int first_local_ = 0;  // the world's rank of local rank 0
  std::vector<int> numbers_;
  bool knows_fates_ = true;
};

}  // namespace lockstep::comm

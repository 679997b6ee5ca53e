// Whether the launcher has reported a failure of the job, and why.
#pragma once

#include <optional>
#include <string>

#include "core/control.h"

namespace lockstep::comm {

// Any thread may call it.
class LauncherStatus {
 public:
  // Throws ConfigError, as Control does.
  LauncherStatus();

  // Whether there is a launcher that reports failures.
  bool has_launcher() const { return control_.has_value(); }
  // Whether a failure has been reported: then this process is about to be stopped.
  bool has_reported() const { return control_ && control_->failures() != 0; }
  // "was aborted (rank 3 on host2 was killed by SIGKILL)".
  std::string given_up() const;
  // Whether it has reported more than how this host's ranks ended.
  bool is_explained() const { return has_reported() && !control_->reason().empty(); }
  // The same with how this host's ranks ended, for messages that do not name it otherwise: "was
  // aborted (rank 1 was killed by SIGKILL)".
  std::string given_up_with_fates() const;
  // How this rank of the world ended, if it is of this host: "was killed by SIGKILL"; nothing while
  // it runs.
  std::optional<std::string> fate(int rank) const;

 private:
  const std::optional<Control> control_;
  int first_local_ = 0;  // the world's rank of local rank 0
};

}  // namespace lockstep::comm

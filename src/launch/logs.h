// The files of a job, in torchrun's layout:
//   LOG_DIR/RUN_ID_xxxxxxxx/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}
#pragma once

#include <optional>
#include <string>

#include "core/fd.h"
#include "lockstep/launch/run.h"

namespace lockstep::launch {

class Logs {
 public:
  // Makes the job's folder when the options ask for files: below --log-dir, or below TMPDIR when
  // only --redirects or --tee was given. Throws ConfigError when it cannot.
  explicit Logs(const Options& options);

  bool is_on() const { return !folder_.empty(); }
  // The job's own folder.
  const std::string& folder() const { return folder_; }
  // "FOLDER/attempt_0"
  std::string attempt(int restarts) const;
  // "FOLDER/attempt_0/3", which is there on return.
  std::string of_rank(int restarts, int local_rank) const;
  // Opens a new file for appending: the rank and the launcher may both write to it.
  static Fd open_file(const std::string& path);

 private:
  std::string folder_;
};

}  // namespace lockstep::launch

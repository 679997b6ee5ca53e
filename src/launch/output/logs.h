// The files of a job, in torchrun's layout:
//   LOG_DIR/RUN_ID_xxxxxxxx/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}
//   LOG_DIR/RUN_ID_xxxxxxxx/attempt_N/{filtered_stdout.log,filtered_stderr.log}
#pragma once

#include <string>
#include <vector>

#include "core/files/fd.h"
#include "launch/job/run.h"

namespace lockstep::launch {

class Logs {
 public:
  static bool are_asked_for(const Options& options);
  // Makes the job's folder when the options ask for files: below --log-dir, or below TMPDIR when
  // only --redirects, --tee or filters were given. Its name is absolute. Throws ConfigError when it
  // cannot.
  explicit Logs(const Options& options);

  bool is_on() const { return !folder_.empty(); }
  // The job's own folder.
  const std::string& folder() const { return folder_; }
  // "FOLDER/attempt_0"
  std::string attempt(int restarts) const;
  // "FOLDER/attempt_0/3"
  std::string of_rank(int restarts, int local_rank) const;

  // What one rank has in an attempt: its folder, and the files that take a stream or a copy of it.
  struct Files {
    Fd out, err;
    bool has_folder = false;
  };
  // Makes and opens what the options ask for, for each local rank; nothing when is_on() is false.
  // May wait for the disk. Throws ConfigError.
  std::vector<Files> open_all(const Options& options, int restarts) const;

  // Below of_rank().
  static constexpr const char* kOut = "/stdout.log";
  static constexpr const char* kErr = "/stderr.log";
  static constexpr const char* kError = "/error.json";
  // Below attempt().
  static constexpr const char* kFilteredOut = "/filtered_stdout.log";
  static constexpr const char* kFilteredErr = "/filtered_stderr.log";

 private:
  std::string folder_;
};

}  // namespace lockstep::launch

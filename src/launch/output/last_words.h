// What ranks wrote last, for the report on a job that has failed.
#pragma once

#include <string>
#include <vector>

#include "launch/job/outcome.h"
#include "launch/job/session.h"

namespace lockstep::launch {

class LastWords {
 public:
  // Of the ranks from `first_rank` on, after `restarts` restarts. The session must outlive it.
  LastWords(const Session& session, int first_rank, int restarts)
      : session_(session), first_rank_(first_rank), restarts_(restarts) {}

  // The end of the rank's stderr, from its file or from what passed the launcher; empty when it did
  // neither.
  std::string of(int rank) const;
  // The message in the error file that the rank's program has written itself, as torchrun's workers
  // do; empty without one.
  std::string error_of(int rank) const;
  // The lines that quote it where the user has not seen it: in a file only, or not shown.
  std::vector<std::string> unseen(int rank) const;
  // Hands failure.txt to `output`, which says where it is, or why it is not.
  void write_failure_report(const Outcome& outcome, LogMultiplexer& output) const;

 private:
  bool is_redirected(int rank) const;
  std::string file_of(int rank) const;
  std::string end_of(const std::string& path, size_t most) const;

  const Session& session_;
  const int first_rank_, restarts_;
  mutable bool stalled_ = false;  // the file system does not answer in time: it is not asked again
};

}  // namespace lockstep::launch

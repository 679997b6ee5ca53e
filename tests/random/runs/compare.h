// Follows courses of a run, and compares what they leave with what an undisturbed one does.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "random/runs/plan.h"

namespace lockstep::test::runs {

// What a run has left.
struct Left {
  std::string fault;     // what no course may do; empty: none
  std::string leftover;  // a file that no run may leave; empty: none
  // By place and step: what rank 0 saw there, each time.
  std::map<std::pair<std::string, int64_t>, std::vector<std::string>> series;
  std::vector<std::string> ends;             // by rank
  std::map<std::string, std::string> saved;  // what the newest checkpoint has, by name
  int64_t saved_by = 0;                      // that many ranks
  int happened = 0;                          // interruptions
  bool was_killed = false;                   // or ended without saving
  bool was_late = false;                     // a time limit has ended a start

  Places places() const;
};

// Starts processes as the course says, in a folder that is empty. Forks: the caller has run no
// operation of torch.
Left follow(const Settings& run, const Course& course, const std::string& folder);

// The first difference; empty: none.
std::string difference(const Settings& run, const Course& course, const Left& calm,
                       const Left& left, const std::string& folder);

}  // namespace lockstep::test::runs

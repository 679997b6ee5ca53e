// The page on a failed job that goes to a file: everything that is known, rank by rank.
#pragma once

#include <map>
#include <string>

#include "launch/job/outcome.h"

namespace lockstep::launch {

// `last_words`: by rank, the end of what it wrote to stderr.
std::string failure_report(const Outcome& outcome, const std::map<int, std::string>& last_words);

}  // namespace lockstep::launch

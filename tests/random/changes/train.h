// A course at work: a phase of it on ranks, or all of it in one process.
#pragma once

#include <string>

#include "lockstep/comm/group.h"
#include "random/changes/course.h"

namespace lockstep::test::changes {

// Runs the phase `phase` with what the phases before have saved in `folder`, saves there, and
// compares with one process that has done all phases. Every rank of `group` calls it. Returns what
// is wrong; empty: nothing. Throws what the library threw.
std::string run_phase(const Course& course, size_t phase, const Group& group,
                      const std::string& folder);

}  // namespace lockstep::test::changes

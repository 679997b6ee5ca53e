#include "random/changes/train.h"

#include <algorithm>

#include "random/changes/plain.h"
#include "random/changes/training.h"

namespace lockstep::test::changes {
namespace {

Named in_lanes(const Course& course, size_t last) {
  Training training(course, Where::Lanes, Group(), 0);
  for (size_t phase = 0; phase <= last; ++phase) {
    if (phase > 0) training.begin_again(phase);
    training.run(phase);
  }
  return training.state();
}

// Whether a phase goes on with the state of another implementation, which rounds otherwise.
bool changes_kernels(const Course& course, size_t last) {
  for (size_t i = 1; i <= last; ++i) {
    const bool is_other = course.phases[i].optimizer != course.phases[i - 1].optimizer;
    if (is_other && !course.is_fresh(i)) return true;
  }
  return false;
}

// What roundings may have come to.
double tolerance_of(const Course& course, size_t last) {
  bool is_narrow = false;
  for (size_t i = 0; i <= last; ++i)
    is_narrow = is_narrow || course.phases[i].narrow || course.phases[i].reduced;
  return is_narrow ? 1e-4 : 1e-9;
}

}  // namespace

std::string run_phase(const Course& course, size_t phase, const Group& group,
                      const std::string& folder) {
  Named got;
  {
    Training training(course, Where::Ranks, group, phase);
    if (phase > 0) training.restore(folder);
    training.run(phase);
    got = training.state();
    if (phase + 1 < course.phases.size()) {
      const auto checkpoints = training.checkpointer(folder);
      checkpoints->save(course.begin(phase + 1));
      training.run_discarded(*checkpoints);
      checkpoints->finish();
    }
  }
  std::string error = difference(got, in_plain_torch(course, phase), tolerance_of(course, phase));
  if (!error.empty()) error = "from one process: " + error;
  // An Fsdp adds up a norm in another order than a Ddp, and adds averages to gradients that were
  // left, where a Ddp averages their sums.
  const bool leaves = course.clear != Clear::Wrapper &&
                      (!course.late.empty() ||
                       std::ranges::count(course.changes, What::DropGroup, &Change::what) > 0);
  const bool is_norm = course.clip == Course::Clip::Norm;
  const bool is_exact = course.lanes > 0 && !((is_norm || leaves) && course.has(Kind::Fsdp)) &&
                        tolerance_of(course, phase) == 1e-9 && !changes_kernels(course, phase);
  if (error.empty() && is_exact) {
    error = difference(got, in_lanes(course, phase), 0);
    if (!error.empty()) error = "from one rank's lanes: " + error;
  }
  const std::string own = bytes_of(got);
  if (group.broadcast_bytes(own, 0) != own && error.empty()) error = "from rank 0";
  return error;
}

}  // namespace lockstep::test::changes

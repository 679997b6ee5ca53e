// The losses by which a run is judged.
#pragma once

#include <vector>

#include "lockstep/train/run_history.h"

namespace lockstep::train {

// Those of the reports. A last one of few steps is part of the one before: it would be the loss of
// a batch or two.
std::vector<Point> losses_of(const RunHistory& run);

// Moving means, of a twentieth of the points each, in the order of the last one of them. Of fewer
// than 40 points these themselves.
std::vector<Point> moving_means(const std::vector<Point>& points);

}  // namespace lockstep::train

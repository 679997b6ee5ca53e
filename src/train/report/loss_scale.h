// By what a rise of the loss is measured.
#pragma once

#include <algorithm>
#include <cmath>

namespace lockstep::train {

// Losses so far.
struct LossesSeen {
  double first = 0, best = 0;
  double change = 0;  // from one report to the next, the largest of late

  // `by`: the next loss, less the one before it.
  void add_change(double by) { change = std::max(std::abs(by), 0.9 * change); }
};

// The distance from the best that is usual. Losses around zero, such as those of policies, change
// by many times what they are; of these a change below 0.1 is always usual.
inline double usual_distance(const LossesSeen& losses) {
  constexpr double kSmallLoss = 0.1;
  const double moved =
      std::max({std::abs(losses.first - losses.best), std::abs(losses.best), losses.change});
  return losses.best <= losses.change ? std::max(moved, kSmallLoss) : moved;
}

}  // namespace lockstep::train

#include "train/report/losses.h"

#include <algorithm>

namespace lockstep::train {
namespace {

// Of a run: losses of single batches tremble, and the least of many of them is luck.
constexpr size_t kWindows = 20;

}  // namespace

std::vector<Point> losses_of(const RunHistory& run) {
  std::vector<Point> points = run.loss.points();
  if (points.size() < 2) return points;
  Point& before = points[points.size() - 2];
  if (points.back().weight >= 0.5 * before.weight) return points;
  before = joined(before, points.back());
  points.pop_back();
  return points;
}

std::vector<Point> moving_means(const std::vector<Point>& points) {
  const size_t width = std::max<size_t>(points.size() / kWindows, 1);
  std::vector<Point> means;
  for (size_t end = width; end <= points.size(); ++end) {
    Point mean = points[end - width];
    for (size_t i = end - width + 1; i < end; ++i) mean = joined(mean, points[i]);
    means.push_back(mean);
  }
  return means;
}

}  // namespace lockstep::train

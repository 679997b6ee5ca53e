// Values that are thinned as they come.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/train/run_history.h"

namespace lockstep::train {
namespace {

constexpr size_t kMostKept = 2048;  // steps of reports without a number

}  // namespace

Point joined(const Point& a, const Point& b) {
  Point both{a.first, b.last, a.count + b.count, a.mean, a.least, a.most, a.weight + b.weight};
  if (b.count == 0) return both;
  if (a.count == 0) {
    both.mean = b.mean, both.least = b.least, both.most = b.most;
    return both;
  }
  // Of finite values, but their sum may overflow.
  const double share = b.weight / both.weight;
  both.mean = a.mean * (1 - share) + b.mean * share;
  both.least = std::min(a.least, b.least);
  both.most = std::max(a.most, b.most);
  return both;
}

void Series::add(int64_t step, double value, double weight) {
  const bool finite = std::isfinite(value);
  if (!finite) {
    if (not_finite_++ == 0) first_not_finite_ = step;
    if (last_not_finite_.size() >= kMostKept) {
      last_not_finite_.erase(last_not_finite_.begin(), last_not_finite_.begin() + kMostKept / 2);
    }
    last_not_finite_.push_back(step);
    value = std::numeric_limits<double>::quiet_NaN();
  }
  const Point point{step, step, finite ? 1 : 0, value, value, value, finite ? weight : 0};
  if (!points_.empty() && in_last_ < reports_per_point_) {
    points_.back() = joined(points_.back(), point);
    ++in_last_;
    return;
  }
  if (points_.size() >= 2 * most_) {
    for (size_t i = 0; i < most_; ++i) points_[i] = joined(points_[2 * i], points_[2 * i + 1]);
    points_.resize(most_);
    reports_per_point_ *= 2;
  }
  points_.push_back(point);
  in_last_ = 1;
}

void Series::cut(int64_t step) {
  while (!points_.empty() && points_.back().first > step) {
    points_.pop_back();
    in_last_ = reports_per_point_;
  }
  while (!last_not_finite_.empty() && last_not_finite_.back() > step) {
    last_not_finite_.pop_back();
    --not_finite_;
  }
  if (first_not_finite_ <= step) return;
  not_finite_ = 0;
  first_not_finite_ = -1;
}

}  // namespace lockstep::train

// What an evaluation measures, as values that count up batch by batch and are the same on all ranks
// in the end.
//
//   Accuracy accuracy;
//   for (auto [x, y] : loader.epoch(0)) accuracy.update(net->forward(x), y);
//   const double result = accuracy.compute(world);   // over all ranks' samples
//
// All sums are exact (lockstep/core/exact_sum.h): a result depends on the samples alone, to the
// bit, not on how batches, lanes and ranks have divided them. Ranks may have different numbers of
// samples, or none. lockstep/train/metrics.h has the metrics.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/state.h"
#include "lockstep/comm/group.h"
#include "lockstep/core/exact_sum.h"

namespace lockstep::train {

// What a metric has counted.
struct MetricState {
  std::vector<int64_t> sums = {};  // ranks' are added up: counts, and digits of ExactSums
  std::vector<double> rows = {};   // those of the ranks are concatenated
  std::string fault = {};          // an input that cannot be counted; empty: none
  std::string kind = {};           // of the metric that counted; empty: not known
};

// Copies count on their own.
class Metric {
 public:
  virtual ~Metric() = default;

  // The name of compute()'s value in values(): "accuracy".
  virtual std::string name() const = 0;
  // What metrics whose counts can be added up have in common: which metric it is, and the options
  // that its counts depend on.
  virtual std::string kind() const { return name(); }

  // Counts a batch of this rank: outputs and targets as each metric says, on any device. Weights,
  // one per sample and not negative, say how much each counts; undefined: 1. Communicates nothing.
  // Throws ConfigError, and then has counted nothing, for shapes and dtypes that do not fit. A
  // value that cannot be counted, such as NaN, is kept for compute().
  virtual void update(const at::Tensor& outputs, const at::Tensor& targets,
                      const at::Tensor& weights = {}) = 0;

  // The metric over everything that the group's ranks have counted since reset(); they keep
  // counting. Every rank calls it, and gets the same bits: an all_gather of a few bytes, and an
  // all_reduce, for AUC an all_gather. Throws DataError on all ranks when one of them has met a
  // value that cannot be counted (it names rank, batch, sample and value), and when there was no
  // sample at all.
  double compute(const Group& group = {}) const;
  // As compute(), with everything that the metric says, by name: {"accuracy", 0.9}.
  std::map<std::string, double> values(const Group& group = {}) const;

  // Forgets everything.
  void reset() {
    state_ = {};
    updates_ = 0;
  }

  // This rank's counts, to be kept and taken back or added elsewhere: of an equal metric.
  const MetricState& state() const { return state_; }
  // Throws ConfigError, and then has added nothing, for another kind()'s and for those of another
  // number of classes or columns.
  void add(const MetricState& state);

 protected:
  // The values of what all ranks have counted.
  virtual std::map<std::string, double> values_of(const MetricState& total) const = 0;

  // The sums of all ranks; throws as compute() does.
  MetricState total(const Group& group) const;
  // Keeps the first fault: "sample 7 of batch 2: what".
  void note_fault(int64_t sample, std::string_view what);
  // Begins a batch.
  void begin_update() {
    ++updates_;
    if (state_.kind.empty()) state_.kind = kind();
  }

  MetricState state_;

 private:
  int64_t updates_ = 0;
};

// For Checkpointer::track(name, stateful(metric, group)): each rank's counts. On another number of
// ranks each saved part goes to one of them, so that the result is the same. Restoring counts of
// another kind() throws CheckpointError.
std::shared_ptr<checkpoint::Stateful> stateful(Metric& metric, const Group& group);

}  // namespace lockstep::train

namespace lockstep {
using train::Metric;
}  // namespace lockstep

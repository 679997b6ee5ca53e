// What a run prints, and the log of its figures: callbacks of a Trainer.
#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/comm/world.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/monitor.h"

namespace lockstep::train {

// The mean of the losses since the last look, and how fast samples were taken.
class Pace {
 public:
  // A step has been made.
  void add(const RunState& state);
  // Begins anew.
  void reset(const RunState& state);

  // Since reset(); the rate leaves out time for evaluations and checkpoints.
  double loss() const { return steps_ == 0 ? 0 : loss_ / static_cast<double>(steps_); }
  double samples_per_s(const RunState& state) const;

 private:
  double loss_ = 0;
  int64_t steps_ = 0;
  int64_t samples_ = 0;
  double since_ = 0;
};

// Of Progress.
struct ProgressOptions {
  int64_t every_steps = 50;  // between two lines; 0: none
  // One line that is written over, several times a second, as for a terminal.
  bool updating = false;
};

// Prints on rank 0: a line every so many steps with the mean loss since the one before, and one
// for each evaluation.
class Progress : public Callback {
 public:
  // Prints to `out`, which has to outlive this.
  explicit Progress(std::ostream& out, const ProgressOptions& options = {});

  void on_train_begin(const RunState& state) override;
  void on_step_end(const RunState& state, Requests& requests) override;
  void on_evaluate(const RunState& state, Requests& requests) override;
  void on_train_end(const RunState& state) override;

  // "epoch 1/2  step 50/938  5 %  loss 0.5432  ...  12,345 samples/s  8 s left"
  static std::string line(const RunState& state, const Pace& pace);

 private:
  void print(const RunState& state);

  std::ostream& out_;
  ProgressOptions options_;
  Pace pace_;
  int64_t printed_at_ = -1;
  std::chrono::steady_clock::time_point next_ = {};
};

// Keeps a RunMonitor (lockstep/train/monitor.h) of the training: metrics.jsonl, with the figures of
// all ranks, and warnings. The steps, epochs and what was restored are the training's.
class Monitoring : public Callback {
 public:
  // Communicates nothing yet.
  Monitoring(const comm::World& world, MonitorOptions options);
  ~Monitoring() override;

  // A collective.
  void on_train_begin(const RunState& state) override;
  void on_step_end(const RunState& state, Requests& requests) override;
  void on_evaluate(const RunState& state, Requests& requests) override;
  void on_save(const RunState& state, Requests& requests) override;
  void on_train_end(const RunState& state) override;
  void on_exception(const RunState& state, std::string_view what) override;

  // Adds an event of the program's own to the log, on rank 0: RunMonitor::event(). Nothing before
  // the run.
  void event(std::string_view kind, std::string_view text);

 private:
  comm::World world_;
  MonitorOptions options_;
  std::unique_ptr<RunMonitor> monitor_;
};

}  // namespace lockstep::train

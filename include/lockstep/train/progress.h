// What a run prints, and the log of its figures: callbacks of a Trainer.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/comm/world.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/monitor.h"
#include "lockstep/train/progress_display.h"

namespace lockstep::train {

// Options of Progress.
struct ProgressOptions {
  // Between two lines; 0: none. On a terminal the line is written over, more often than that.
  int64_t every_steps = 50;
};

// Prints on rank 0: a line every `every_steps` steps with the mean loss since the one before, and
// one for each evaluation. Speed leaves out the time of evaluations and checkpoints.
class Progress : public Callback {
 public:
  // Prints to `out`, which has to outlive this.
  explicit Progress(std::ostream& out, const ProgressOptions& options = {});
  // Prints through what others print through, too, such as Monitoring with the same display, which
  // lets the line name the slowest rank.
  explicit Progress(std::shared_ptr<ProgressDisplay> display, const ProgressOptions& options = {});

  void on_train_begin(const RunState& state) override;
  void on_step_end(const RunState& state, Requests& requests) override;
  void on_evaluate(const RunState& state, Requests& requests) override;
  void on_train_end(const RunState& state) override;
  void on_exception(const RunState& state, std::string_view what) override;

 private:
  void show(const RunState& state);
  void begin_line(const RunState& state);

  std::shared_ptr<ProgressDisplay> display_;
  ProgressOptions options_;
  // Since the last line.
  double loss_ = 0;  // the sum over their samples, but for those of steps that were skipped
  double since_ = 0;
  int64_t steps_ = 0, samples_ = 0, loss_samples_ = 0;
};

// Keeps a RunMonitor (lockstep/train/monitor.h) of the training: metrics.jsonl, with the figures of
// all ranks, warnings, and events where a stage begins. The steps, epochs and what was restored are
// the training's.
class Monitoring : public Callback {
 public:
  // Communicates nothing yet. Relative paths are of the working directory in which this was made.
  Monitoring(const comm::World& world, MonitorOptions options);
  ~Monitoring() override;

  // A collective.
  void on_train_begin(const RunState& state) override;
  void on_epoch_begin(const RunState& state) override;
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
  std::string stage_ = {};
};

}  // namespace lockstep::train

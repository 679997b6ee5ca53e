// What a program does at fixed points of a training.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/compiler.h"

namespace lockstep::train {

// Where the training stands. Numbers of steps, epochs and samples count on over restarts; all but
// `rank` and times are the same on all ranks.
struct RunState {
  int rank = 0;
  int ranks = 1;
  // Whether this is the rank that writes and prints.
  bool is_main() const { return rank == 0; }

  std::string stage = {};    // its name; empty without stages
  int64_t epoch = 0;         // of the stage, from 0
  int64_t epochs = 0;        // of the stage; 0: as many as it takes
  int64_t step = 0;          // steps made
  int64_t steps = 0;         // that the run will have, unless it is stopped before
  int64_t samples = 0;       // taken on all ranks
  int64_t step_samples = 0;  // of the last step
  // Updates that were left out (overflow, a loss that is not finite, no target): one a step, or of
  // several models one of each.
  int64_t skipped = 0;

  double loss = 0;                       // of the last step, the mean over all ranks' samples
  std::map<std::string, double> losses;  // with several models: of each
  double learning_rate = 0;              // of the last step, of the first parameter group
  // Before it was clipped, where it is; none in a step that a GradScaler has skipped for an
  // overflow at a scale above 1.
  std::optional<double> gradient_norm;
  double loss_scale = 1;                  // with float16
  std::map<std::string, double> metrics;  // of the last evaluation
  int64_t evaluated_at = -1;              // the step of the last evaluation; -1: none yet
  int64_t saved_at = -1;                  // the step of the last checkpoint; -1: none yet
  int64_t resumed_at = -1;                // the step that was restored; -1: none was
  int64_t resumed_samples = 0;            // of `samples`: those before that step

  double seconds = 0;                // since this process began to train
  double data_seconds = 0;           // of them: waiting for batches
  double communication_seconds = 0;  // in steps, blocked in collectives
  double evaluation_seconds = 0;     // evaluating
  double saving_seconds = 0;         // saving checkpoints

  // In on_train_end(): why, "finished", "stopped", "early stopping", "time limit" or "preempted".
  std::string ended = {};
};

// What a callback may ask for. On which rank does not matter: it happens on all of them. Asked for
// in on_step_end() it happens after the next step, in which the ranks agree on it (in that of the
// last step, a save at the end of the run); otherwise at once.
class Requests {
 public:
  // The run ends as if its last step were made: evaluated, saved.
  void stop() { stop_ = true; }
  void evaluate() { evaluate_ = true; }
  void save() { save_ = true; }

  // What was asked for.
  bool wants_stop() const { return stop_; }
  bool wants_evaluation() const { return evaluate_; }
  bool wants_save() const { return save_; }

 private:
  bool stop_ = false, evaluate_ = false, save_ = false;
};

// Every rank calls all of its callbacks, in the order in which the Trainer was given them, at each
// point. A callback that communicates has to do so on every rank. What one throws ends the
// training on all ranks. Nothing here needs a Trainer: a test calls the functions with a RunState.
class Callback {
 public:
  virtual ~Callback() = default;

  // Before the first step, after restoring.
  virtual void on_train_begin(const RunState&) {}
  // Before an epoch's first step, and before the first step after restoring in the middle of an
  // epoch.
  virtual void on_epoch_begin(const RunState&) {}
  virtual void on_step_begin(const RunState&) {}
  virtual void on_step_end(const RunState&, Requests&) {}
  // After the epoch's evaluation, before its checkpoint.
  virtual void on_epoch_end(const RunState&, Requests&) {}
  virtual void on_evaluate(const RunState&, Requests&) {}
  // After a checkpoint (one that is written in the background is not on the disk yet). What is
  // asked for here is not in it.
  virtual void on_save(const RunState&, Requests&) {}
  // The last call, unless the training ends with an exception. What it throws is thrown on its rank
  // alone: the others may have returned from run().
  virtual void on_train_end(const RunState&) {}
  // The last call on a rank whose training ends with an exception, which is thrown on afterwards.
  // Must not communicate; what it throws is logged, and the other callbacks are called.
  virtual void on_exception(const RunState&, std::string_view /*what*/) {}
};

}  // namespace lockstep::train

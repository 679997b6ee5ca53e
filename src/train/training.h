// What a Trainer is made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/directory/folder_lock.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/core/preemption.h"
#include "lockstep/data/loader.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/lanes.h"
#include "lockstep/parallel/lr_scheduler.h"
#include "lockstep/parallel/stateful.h"
#include "lockstep/parallel/weight_average.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "lockstep/train/trainer.h"
#include "train/feed.h"

namespace lockstep::train {

// Models, optimizers and what belongs to each.
struct TrainedPart {
  std::string name;
  Model model;
  std::vector<at::Tensor> parameters;  // each once; of an Fsdp this rank's shards
  std::unique_ptr<parallel::Ddp> ddp;  // one of both
  std::unique_ptr<parallel::Fsdp> fsdp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  parallel::ZeroOptimizer* zero = nullptr;  // the optimizer, where it is one
  std::optional<parallel::GradScaler> scaler;
  std::optional<parallel::LrScheduler> schedule;
  parallel::Schedule rate_of_step;  // which it follows
  std::vector<double> base_rates;   // of the schedule, by parameter group
  std::vector<double> rates;        // that it has set last
  std::optional<parallel::PlateauOptions> plateau_options;
  std::optional<parallel::ReduceLrOnPlateau> plateau;
  std::string plateau_metric;
  std::optional<parallel::LaneMean> lane_mean;
  std::unique_ptr<parallel::WeightAverage> average;  // of parameters and buffers

  // What the schedule has set is remembered. Throws ConfigError for rates that are others by now.
  void note_rates();
  void check_rates() const;
  // Before its shards are written outside of a step: parameters that are whole would keep some of
  // them. And another part's update may have run this model and left its graph, which Fsdp takes
  // for one that other ranks still use: those that share a memory meet here.
  void settle_shards();

  void zero_grad() { ddp ? ddp->zero_grad() : fsdp->zero_grad(); }
  [[nodiscard]] parallel::Hold hold() { return ddp ? ddp->hold() : fsdp->hold(); }
  void sync_buffers() { ddp ? ddp->sync_buffers() : fsdp->sync_buffers(); }
  parallel::LaneRange<parallel::BatchOfLane> lanes(const data::Step& step) const {
    return ddp ? ddp->lanes(step) : fsdp->lanes(step);
  }
  // As parallel::clip_grad_norm_().
  at::Tensor clip(double max_norm) {
    return ddp ? parallel::clip_grad_norm_(parameters, max_norm) : fsdp->clip_grad_norm_(max_norm);
  }
  // To a checkpointer, under `name`.
  void track_model(checkpoint::Checkpointer& checkpoints) {
    if (fsdp) {
      checkpoints.track(name, parallel::stateful(*fsdp));
    } else {
      checkpoints.track(name, model.module());
    }
  }
};

// A stage of more has no end that a schedule could see: epochs of 2^63 - 1 stand for "until the
// time is over".
constexpr int64_t kMostSteps = int64_t{1} << 53;

// A stage, and its place in the data.
struct StageRun {
  int64_t steps_of(int64_t epochs) const {
    int64_t product = 0;
    const bool overflows = __builtin_mul_overflow(epochs, steps_of_epoch, &product);
    return overflows ? kMostSteps : std::min(product, kMostSteps);
  }

  Stage stage;
  std::unique_ptr<data::Loader> loader;
  int64_t steps_of_epoch = 0;
  int64_t steps = 0;  // of the stage; 0: no end of its own
};

// What a step that is made reports, added up over the ranks by one all_reduce.
struct StepSums {
  double loss = 0, weight = 0, samples = 0;
  double bad = 0;  // ranks whose loss is not finite
  double stop = 0, save = 0, evaluate = 0, preempted = 0, late = 0;
};

// Averages of several parts, which may have buffers in common: those that were applied last are put
// back first.
class AppliedAverages {
 public:
  AppliedAverages() = default;
  ~AppliedAverages() {
    while (!applied_.empty()) applied_.pop_back();
  }
  AppliedAverages(AppliedAverages&&) = default;
  AppliedAverages& operator=(AppliedAverages&&) = delete;

  void add(parallel::WeightAverage& average) { applied_.push_back(average.apply()); }

 private:
  std::vector<parallel::WeightAverage::Applied> applied_;
};

// Everything that happens in a Trainer. The parts of the loop are in files of their own: setup.cpp,
// step.cpp, evaluation.cpp, saving.cpp.
class Training {
 public:
  Training(const comm::World& world, std::vector<Part> parts, StepFunction step, DataSource data,
           TrainerOptions options);

  Outcome run();
  std::map<std::string, double> evaluate();
  // The same outside of the loop, where nothing else tells the other ranks of an error.
  std::map<std::string, double> evaluate_for_program();
  // The parts' averaged weights, where they are averaged and not applied yet.
  AppliedAverages apply_averages();
  double update(std::string_view part, const LossOfBatch& loss);

  const RunState& state() const { return state_; }
  TrainedPart& part(std::string_view name);
  template <class Object>
  void track(const std::string& name, Object object) {
    if (has_begun_)
      throw ConfigError("[train] track() of " + name + " after run(): call it before");
    if (checkpoints_) checkpoints_->track(name, std::move(object));
  }

 private:
  using Clock = std::chrono::steady_clock;

  // setup.cpp
  void make_parts(std::vector<Part> parts);
  void attach(TrainedPart& part);
  void make_optimizer(TrainedPart& part, const MakeOptimizer& make);
  void make_schedule(TrainedPart& part, const LearningRate& rate);
  void make_stages(DataSource data);

  // same_optimizers.cpp
  void compare_optimizers() const;
  std::vector<checkpoint::Values> optimizer_options() const;  // by part
  void warn_of_restored_options(const std::vector<checkpoint::Values>& given) const;

  // training.cpp
  void train();
  void train_stage(StageRun& run);
  bool is_full(const StageRun& run) const;
  // Until the end of the run, from here; nothing where neither epochs nor steps are given.
  std::optional<int64_t> steps_left() const;
  MicroBatches* next_of(Feed& feed);
  void step(const StageRun& run, bool ends_epoch);
  void after_step(const StageRun& run, bool ends_epoch);
  void after_epoch(const StageRun& run);
  // Whether the run ends with this step, as far as is known.
  bool ends_run(const StageRun& run) const;
  // Whether the end of the run evaluates this step, before it saves.
  bool is_evaluated_at_end() const {
    return ended_ != Ended::Preempted && options_.evaluation.data &&
           state_.evaluated_at != state_.step;
  }
  void evaluate_now();
  void save_before_leaving();
  void evaluate_what_is_due();
  void make_up();
  bool owes_epoch_end() const;
  void save();
  void finish();
  std::string failure_of(std::string_view what) const;
  void tell_others(std::string_view what) const;
  void fail();
  bool is_over() const { return ended_.has_value(); }
  void end(Ended why) {
    if (!ended_) ended_ = why;
  }
  template <class Point>
  void call(const Point& point);
  template <class Point>
  void call_and_agree(const Point& point);

  // step.cpp
  StepSums backward(TrainedPart& part, const LossOfBatch& loss);
  StepSums backward_of_lanes(TrainedPart& part, const LossOfBatch& loss);
  void backward_of(TrainedPart& part, const at::Tensor& loss);
  at::Tensor loss_of(const data::Batch& batch, const LossOfBatch& loss) const;
  int64_t count_of(const data::Batch& batch) const;
  double sum_over_ranks(double mine);
  StepSums agreed(StepSums mine) const;
  StepSums flags() const;
  void note(const StepSums& sums);
  void share_requests();
  bool refuses(TrainedPart& part, const StepSums& mine, const StepSums& sums);
  std::vector<at::Tensor> copies_of_buffers() const;
  void restore_buffers(const std::vector<at::Tensor>& copies);

  // With mixed precision: what forward passes run in.
  std::unique_ptr<parallel::Autocast> autocast() const;

  // evaluation.cpp
  std::map<std::string, double> measured(const data::Batch& batch) const;
  int64_t calls_for_others(int64_t own, int64_t lanes) const;
  void measure_for_others(const data::Dataset& data) const;
  void judge();

  // saving.cpp
  void track_all();
  std::shared_ptr<checkpoint::Stateful> progress();
  std::string owed() const;
  void owe(const std::string& words);
  bool saves() const;  // if nothing stops it
  void claim_directory();
  void restore();
  void restore_state(bool is_restarted);
  bool is_restarted_here();
  void begin_job();
  void write_own_job();
  std::map<std::string, std::string> watched_metrics() const;
  // `unused`: by part, the plateau's state of a run that begins.
  void forget_other_metrics(const std::vector<parallel::PlateauState>& unused);
  void set_rates();
  std::map<std::string, double> base_rates() const;
  std::string best_in_directory();
  template <class Look>
  std::string seen_by_main(const Look& look);
  void refuse_others();
  std::map<std::string, double> metrics_of_step() const;
  void finish_saving();
  // Of the names of a part's objects in checkpoints.
  std::string prefix_of(const TrainedPart& part) const {
    return parts_.size() == 1 ? "" : part.name + "_";
  }
  std::string averages_of(const TrainedPart& part) const {  // as a pattern
    return checkpoint::pattern_of(prefix_of(part)) + "average/*";
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - begun_).count(); }

  comm::World world_;
  TrainerOptions options_;
  StepFunction step_function_;
  std::vector<TrainedPart> parts_;
  std::vector<StageRun> stages_;
  std::optional<checkpoint::FolderLock> directory_;  // on rank 0
  std::unique_ptr<checkpoint::Checkpointer> checkpoints_;
  std::optional<PreemptionNotice> own_notice_;

  RunState state_;
  int64_t stage_ = 0;                             // its index
  int64_t stage_steps_ = 0;                       // made in it
  std::map<std::string, double> restored_rates_;  // base_rates() where a checkpoint was saved
  std::map<std::string, std::string> restored_watched_;  // watched_metrics() there
  // Of early stopping, and of the best checkpoint.
  double best_seen_ = 0, best_saved_ = 0;
  bool has_seen_ = false, has_saved_ = false;
  int64_t bad_evaluations_ = 0;
  std::string best_folder_;
  bool owes_job_file_ = false;  // until the first save

  bool has_begun_ = false;
  Clock::time_point begun_ = Clock::now();
  std::optional<Ended> ended_;
  Requests requests_;
  bool has_agreed_ = false;  // in this step
  bool is_in_step_ = false;
  bool is_updating_ = false;  // a part of this step
  bool save_now_ = false, evaluate_now_ = false;
  // That the last step was to have, and a signal left no time for, or an evaluation that failed.
  bool owes_evaluation_ = false, owes_stop_ = false, owes_epoch_ = false;
  std::string saved_owed_;         // owed() in the last checkpoint
  bool is_changed_since_ = false;  // after it, by an evaluation that counts or an epoch's end
  bool is_extra_ = false;          // the evaluation is one that only the run's end asks for
  MicroBatches* micro_ = nullptr;  // of the step that is made
  // Whether an exception that comes now is thrown on all ranks.
  bool is_common_ = false;
  Clock::time_point called_;  // run(), which restores before it begins
  friend class CommonPart;
};

// While it lives, what is called runs in the same way on all ranks, and so do its errors. (An
// exception leaves the mark, which run() looks at.)
class CommonPart {
 public:
  explicit CommonPart(Training& training) : training_(training), before_(training.is_common_) {
    training_.is_common_ = true;
  }
  ~CommonPart() {
    if (std::uncaught_exceptions() == exceptions_) training_.is_common_ = before_;
  }
  CommonPart(const CommonPart&) = delete;
  CommonPart& operator=(const CommonPart&) = delete;

 private:
  Training& training_;
  bool before_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace lockstep::train

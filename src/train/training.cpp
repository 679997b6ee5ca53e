// The loop around the steps.
#include "train/training.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/text.h"
#include "comm/transport.h"
#include "core/divided_up.h"
#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"
#include "lockstep/core/log.h"

namespace lockstep::train {
namespace {

using Seconds = std::chrono::duration<double>;

// While it lives, its time is added to `seconds`.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() { seconds_ += Seconds(std::chrono::steady_clock::now() - begun_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

// How long this process has been blocked in collectives so far.
double blocked_seconds() {
  constexpr auto kWhat = static_cast<size_t>(flight::Activity::Communication);
  return static_cast<double>(flight::own_busy_ns()[kWhat]) * 1e-9;
}

void warn_of_eval(const TrainedPart& part) {
  if (part.model.module().is_training()) return;
  log::warn(
      fmt::format("[train] {} is in eval(), and is trained so: without dropout, and with the "
                  "running statistics "
                  "of BatchNorm as they are. Call train() on it before run(); to freeze single "
                  "layers call their "
                  "own eval()",
                  part.name));
}

}  // namespace

void TrainedPart::note_rates() {
  rates.clear();
  for (const auto& group : optimizer->param_groups()) rates.push_back(group.options().get_lr());
}

void TrainedPart::check_rates() const {
  if (!schedule) return;
  const auto& groups = optimizer->param_groups();
  for (size_t i = 0; i < std::min(rates.size(), groups.size()); ++i) {
    const double now = groups[i].options().get_lr();
    if (now == rates[i]) continue;
    throw ConfigError(fmt::format(
        "[train] the learning rate of {}'s parameter group {} was set to {} in the optimizer, and "
        "the schedule, which had set {}, would undo it: give TrainerOptions::learning_rate a "
        "schedule that has this rate",
        name, i, now, rates[i]));
  }
}

template <class Point>
void Training::call(const Point& point) {
  state_.seconds = seconds();
  for (const auto& callback : options_.callbacks) {
    point(*callback);
    is_common_ = false;  // it may have caught what was thrown on all ranks
  }
}

template <class Point>
void Training::call_and_agree(const Point& point) {
  if (options_.callbacks.empty()) return;
  // What was asked for at the step's end is the next step's to agree on.
  const Requests of_step = std::exchange(requests_, {});
  call(point);
  const CommonPart common(*this);
  const StepSums before{.samples = static_cast<double>(state_.step_samples)};
  StepSums sums = agreed({});
  sums.samples = before.samples;
  note(sums);
  requests_ = of_step;
  has_agreed_ = false;
}

Outcome Training::run() {
  if (has_begun_) throw ConfigError("[train] run() can be called once: make another Trainer");
  has_begun_ = true;
  called_ = Clock::now();
  is_common_ = false;  // of an evaluate() before
  try {
    train();
  } catch (...) {
    fail();
    throw;
  }
  own_notice_.reset();
  return {.ended = *ended_, .state = state_, .best = best_folder_};
}

// What the exception that is being handled has ended.
std::string Training::failure_of(std::string_view what) const {
  return fmt::format("rank {} ended the {} {} step {}: {}", state_.rank, what,
                     is_in_step_ ? "in" : "after", state_.step + (is_in_step_ ? 1 : 0),
                     comm::thrown_text());
}

// The other ranks are told why this one will not come to their next call, unless the exception that
// is being handled is theirs, too. A CommError may be of another group, which has ranks of its own.
void Training::tell_others(std::string_view what) const {
  if (is_common_ || world_.group().failure()) return;
  world_.group().transport().abort_all(failure_of(what));
}

void Training::fail() {
  const std::string text = comm::thrown_text();
  tell_others("training");
  state_.seconds = seconds();
  for (const auto& callback : options_.callbacks) {
    try {
      callback->on_exception(state_, text);
    } catch (...) {
      log::error(
          fmt::format("[train] on_exception() of a callback failed: {}", comm::thrown_text()));
    }
  }
  own_notice_.reset();
}

void Training::train() {
  const auto& saving = options_.saving;
  if (options_.notice == nullptr && saving.on_preemption && !saving.directory.empty()) {
    own_notice_.emplace();
  }
  for (const auto& part : parts_) part.check_rates();
  {
    const CommonPart common(*this);
    restore();
  }
  if (state_.is_main() && !is_over()) {
    for (const auto& part : parts_) warn_of_eval(part);
  }
  begun_ = Clock::now();
  call([&](Callback& one) { one.on_train_begin(state_); });
  if (state_.resumed_at > 0 && !is_over()) make_up();
  while (!is_over() || owes_epoch_end()) {
    train_stage(stages_[stage_]);
    if (is_over()) break;
    if (++stage_ == std::ssize(stages_)) {
      --stage_;
      end(Ended::Finished);
    } else {
      stage_steps_ = 0;
    }
  }
  finish();
}

bool Training::is_full(const StageRun& run) const {
  return (run.stage.steps > 0 && stage_steps_ >= run.stage.steps) ||
         (options_.max_steps > 0 && state_.step >= options_.max_steps);
}

std::optional<int64_t> Training::steps_left() const {
  std::optional<int64_t> left = 0;
  for (int64_t i = stage_; i < std::ssize(stages_) && left; ++i) {
    const StageRun& run = stages_[i];
    const bool is_begun = i == stage_;
    if (run.stage.steps > 0) {
      const int64_t steps = std::min(run.stage.steps, kMostSteps);
      *left += is_begun ? std::max<int64_t>(steps - stage_steps_, 0) : steps;  // may be fewer now
    } else if (run.stage.epochs == 0) {
      left.reset();
    } else if (const int64_t epoch = is_begun ? run.loader->state().epoch : 0;
               epoch < run.stage.epochs) {
      const int64_t in_epoch = divided_up(run.loader->batches_left(), options_.accumulation);
      *left += run.steps_of(run.stage.epochs - epoch - 1) + in_epoch;
    }
  }
  if (options_.max_steps > 0) {
    const int64_t most = std::max<int64_t>(options_.max_steps - state_.step, 0);
    left = std::min(left.value_or(most), most);
  }
  return left;
}

void Training::train_stage(StageRun& run) {
  state_.stage = run.stage.name;
  state_.epochs = run.stage.epochs;
  while ((!is_over() && !is_full(run)) || owes_epoch_end()) {
    const int64_t epoch = run.loader->state().epoch;
    if (run.stage.epochs > 0 && epoch >= run.stage.epochs) return;
    state_.epoch = epoch;
    call([&](Callback& one) { one.on_epoch_begin(state_); });
    Feed feed(*run.loader, options_.loader.lanes, state_.epoch, options_.accumulation);
    for (;;) {
      micro_ = next_of(feed);
      if (micro_ == nullptr) {
        after_epoch(run);
        break;
      }
      step(run, feed.is_done());
      const bool leaves = is_over() || is_full(run);
      // An epoch that the last step has completed is over, too.
      if (leaves && (ended_ == Ended::Preempted || !feed.is_done())) break;
    }
  }
  if (options_.max_steps > 0 && state_.step >= options_.max_steps) end(Ended::Finished);
}

MicroBatches* Training::next_of(Feed& feed) {
  const Stopwatch watch(state_.data_seconds);
  return feed.next();
}

void Training::step(const StageRun& run, bool ends_epoch) {
  is_in_step_ = true;
  const double blocked_before = blocked_seconds();
  if (!options_.callbacks.empty()) call([&](Callback& one) { one.on_step_begin(state_); });
  has_agreed_ = false;
  Step context(*this);
  step_function_(context);
  is_common_ = false;  // as a callback
  if (!has_agreed_) {  // a step function that made no update
    const CommonPart common(*this);
    note(agreed({}));
  }
  if (parts_.size() > 1) {
    // A model that another one's update ran in training (a GAN's discriminator for its generator)
    // has changed its running statistics by each rank's own samples.
    const CommonPart common(*this);
    for (auto& part : parts_) part.sync_buffers();
  }
  for (auto& part : parts_) {
    part.check_rates();
    if (part.schedule) part.schedule->step();
    part.note_rates();
    if (part.average) part.average->update();
  }
  ++state_.step;
  is_in_step_ = false;
  ++stage_steps_;
  state_.samples += state_.step_samples;
  state_.communication_seconds += blocked_seconds() - blocked_before;
  if (!options_.callbacks.empty()) call([&](Callback& one) { one.on_step_end(state_, requests_); });
  after_step(run, ends_epoch);
}

bool Training::ends_run(const StageRun& run) const {
  if (is_over() || (options_.max_steps > 0 && state_.step >= options_.max_steps)) return true;
  return &run == &stages_.back() &&
         (is_full(run) || (run.stage.epochs > 0 && run.loader->state().epoch >= run.stage.epochs));
}

void Training::after_step(const StageRun& run, bool ends_epoch) {
  if (ended_ == Ended::Preempted) {  // there is little time: finish() saves
    owes_evaluation_ = std::exchange(evaluate_now_, false);
    return;
  }
  if (std::exchange(evaluate_now_, false)) {
    evaluate_now();
  } else {
    evaluate_what_is_due();
  }
  const int64_t every = options_.saving.every_steps;
  if (!save_now_ && (every == 0 || state_.step % every != 0)) return;
  // The end of the epoch, or of the run, saves this step, once it has evaluated it.
  save_now_ = ends_epoch || (ends_run(run) && is_evaluated_at_end());
  if (!save_now_) save();
}

// Where a run resumes that was preempted, or whose evaluation failed: what that step was to have.
void Training::make_up() {
  const StageRun& run = stages_[stage_];
  state_.stage = run.stage.name;
  state_.epochs = run.stage.epochs;
  if (std::exchange(owes_stop_, false)) end(Ended::Stopped);
  const bool owes_evaluation = std::exchange(owes_evaluation_, false);
  if (std::exchange(owes_epoch_, false)) {
    after_epoch(run);
  } else if (owes_evaluation) {
    evaluate_now();
  } else {
    evaluate_what_is_due();
  }
  if (std::exchange(save_now_, false)) save();
}

// Whether a signal has left no time for the end of the epoch. It may have come in the last step of
// a stage, or of the run.
bool Training::owes_epoch_end() const {
  return ended_ != Ended::Preempted && stages_[stage_].loader->batches_left() == 0;
}

void Training::evaluate_what_is_due() {
  const int64_t every = options_.evaluation.every_steps;
  if (every > 0 && state_.step % every == 0 && state_.evaluated_at != state_.step) evaluate_now();
}

void Training::after_epoch(const StageRun& run) {
  const auto is_due = [&](int64_t every) { return every > 0 && (state_.epoch + 1) % every == 0; };
  owes_epoch_ = true;
  if (is_due(options_.evaluation.every_epochs) && state_.evaluated_at != state_.step) {
    evaluate_now();
  }
  owes_epoch_ = false;
  is_changed_since_ = true;
  call_and_agree([&](Callback& one) { one.on_epoch_end(state_, requests_); });
  if (std::exchange(evaluate_now_, false) && state_.evaluated_at != state_.step) evaluate_now();
  if (!save_now_ && !is_due(options_.saving.every_epochs)) return;
  save_now_ = ends_run(run) && is_evaluated_at_end();
  if (!save_now_) save();
}

void Training::finish() {
  if (ended_ == Ended::TimeLimit && steps_left() == 0) ended_ = Ended::Finished;  // as well
  {
    const CommonPart common(*this);
    share_requests();
  }
  const bool is_saved =
      state_.saved_at == state_.step && !is_changed_since_ && owed() == saved_owed_;
  const bool evaluates = is_evaluated_at_end();
  if (evaluates) {
    // What is asked for in it, a run that resumes was not asked for.
    const bool is_asked = evaluate_now_;
    is_extra_ = true;
    evaluate_now();
    evaluate_now_ = is_asked;
  }
  // What was saved in this step already has nothing of the evaluation that has just found it best.
  const bool is_asked =
      std::exchange(save_now_, false) || (requests_.wants_save() && state_.saved_at != state_.step);
  // A start without a step, of which each further one would make up the same.
  const bool has_made_up = saves() && is_changed_since_ && state_.saved_at == state_.step &&
                           state_.resumed_at == state_.step;
  const bool is_due = options_.saving.at_end || ended_ == Ended::Preempted || has_made_up;
  if (is_asked || (is_due && (!is_saved || evaluates))) save();
  {
    const CommonPart common(*this);
    finish_saving();
  }
  for (auto& part : parts_) {
    // The program may apply averages next.
    if (parts_.size() > 1 && part.average && part.fsdp && !part.fsdp->is_unsharded())
      part.settle_shards();
  }
  state_.ended = name_of(*ended_);
  call([&](Callback& one) { one.on_train_end(state_); });
}

void Training::evaluate_now() {
  if (!options_.evaluation.data) return;
  try {
    {
      const Stopwatch watch(state_.evaluation_seconds);
      state_.metrics = evaluate();
    }
    state_.evaluated_at = state_.step;
    if (!is_extra_) is_changed_since_ = true;
    const CommonPart common(*this);
    judge();
  } catch (...) {
    owes_evaluation_ = !is_extra_;
    save_before_leaving();
    throw;
  }
  const auto applied = apply_averages();  // callbacks see the weights that were evaluated
  call_and_agree([&](Callback& one) { one.on_evaluate(state_, requests_); });
  for (auto& part : parts_) {
    if (part.average && part.fsdp) part.fsdp->reshard();  // one may have left averages there
  }
}

// The steps since the last checkpoint are none the worse for an evaluation that fails. Where it has
// failed on one rank of several, the others do not come here.
void Training::save_before_leaving() {
  const auto& saving = options_.saving;
  const bool saves = saving.at_end || saving.every_steps > 0 || saving.every_epochs > 0;
  if (!checkpoints_ || !saves || state_.saved_at == state_.step) return;
  if (!is_common_ && world_.size() > 1) return;
  try {
    save();
    checkpoints_->finish();
  } catch (...) {
    log::error(fmt::format("[train] step {} was not saved: {}", state_.step, comm::thrown_text()));
  }
}

void Training::save() {
  if (!checkpoints_) return;
  {
    const Stopwatch watch(state_.saving_seconds);
    const CommonPart common(*this);
    share_requests();
    state_.saved_at = state_.step;
    saved_owed_ = owed();
    is_changed_since_ = false;
    if (has_saved_) checkpoints_->limit_best(best_saved_);
    checkpoints_->save(state_.step, metrics_of_step());
    if (std::exchange(owes_job_file_, false)) {
      checkpoints_->finish();  // before it is there, nothing is this job's
      write_own_job();
    }
  }
  call_and_agree([&](Callback& one) { one.on_save(state_, requests_); });
}

TrainedPart& Training::part(std::string_view name) {
  const auto found = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const TrainedPart& one) { return one.name == name; });
  if (found != parts_.end()) return *found;
  std::string names;
  for (const auto& one : parts_) names += (names.empty() ? "'" : ", '") + one.name + "'";
  throw ConfigError(fmt::format("[train] there is no part '{}': the parts are {}", name, names));
}

}  // namespace lockstep::train

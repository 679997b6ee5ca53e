// What is saved of a training, and restored.
#include <fmt/format.h>

#include <filesystem>
#include <sstream>

#include "core/files/job_file.h"
#include "core/number.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/parallel/stateful.h"
#include "train/options.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

using checkpoint::value_of;

// As one text: their names are not known before they are restored.
using Texts = std::map<std::string, std::string>;

std::string packed(const Texts& texts) {
  std::string all;
  for (const auto& [name, text] : texts) all += fmt::format("{}\t{}\n", name, text);
  return all;
}

Texts unpacked(const std::string& all) {
  Texts texts;
  std::istringstream lines(all);
  std::string name, text;
  while (std::getline(lines, name, '\t') && std::getline(lines, text)) texts[name] = text;
  return texts;
}

// Metrics, without loss of bits.
using Metrics = std::map<std::string, double>;

std::string packed(const Metrics& metrics) {
  Texts texts;
  for (const auto& [name, value] : metrics) texts[name] = number_text(value);
  return packed(texts);
}

Metrics unpacked_metrics(const std::string& all) {
  Metrics metrics;
  for (const auto& [name, text] : unpacked(all)) metrics[name] = number_from(text).value();
  return metrics;
}

std::string watch_text(const std::string& metric, Better better) {
  return fmt::format("{}, {} is better", metric, better == Better::Lower ? "lower" : "higher");
}

std::string plateau_of(const TrainedPart& part) { return "the schedule of '" + part.name + "'"; }
constexpr const char *kEarly = "early stopping", *kBest = "the best checkpoint";

}  // namespace

void Training::track_all() {
  const auto& saving = options_.saving;
  if (saving.directory.empty()) return;
  checkpoint::CheckpointerOptions options{.each_rank = saving.each_rank,
                                          .retention = {.keep_last = saving.keep_last},
                                          .async = saving.async};
  if (saving.best) {
    options.retention.best = {.metric = saving.best->metric,
                              .higher_is_better = saving.best->better == Better::Higher};
  }
  checkpoints_ =
      std::make_unique<checkpoint::Checkpointer>(world_.group(), saving.directory, options);
  for (auto& part : parts_) {
    const std::string prefix = prefix_of(part);
    part.track_model(*checkpoints_);
    checkpoints_->track(prefix + "optimizer", part.zero != nullptr
                                                  ? parallel::stateful(*part.zero)
                                                  : checkpoint::stateful(*part.optimizer));
    if (part.schedule) checkpoints_->track(prefix + "schedule", *part.schedule);
    if (part.plateau) checkpoints_->track(prefix + "plateau", *part.plateau);
    if (part.scaler) checkpoints_->track(prefix + "scaler", *part.scaler);
    if (part.average) checkpoints_->track(prefix + "average", *part.average);
  }
  if (options_.ddp.hook) {
    checkpoints_->track("hook", parallel::stateful(*options_.ddp.hook, world_.group()));
  }
  for (auto& run : stages_) {
    checkpoints_->track(run.stage.name.empty() ? "loader" : "loader_" + run.stage.name,
                        *run.loader);
  }
  checkpoints_->track_generators();
  checkpoints_->track("trainer", progress());
}

// Where the loop stands, and what it has decided so far.
std::shared_ptr<checkpoint::Stateful> Training::progress() {
  using checkpoint::Values;
  return checkpoint::stateful_values(
      [this] {
        return Values{{"stage", stage_},
                      {"stage_steps", stage_steps_},
                      {"step", state_.step},
                      {"samples", state_.samples},
                      {"loss", state_.loss},
                      {"epoch", state_.epoch},
                      {"skipped", state_.skipped},
                      {"evaluated_at", state_.evaluated_at},
                      {"metrics", packed(state_.metrics)},
                      {"best_seen", best_seen_},
                      {"has_seen", has_seen_},
                      {"bad_evaluations", bad_evaluations_},
                      {"best_saved", best_saved_},
                      {"has_saved", has_saved_},
                      {"watched", packed(watched_metrics())},
                      {"base_rates", packed(base_rates())},
                      {"owed", owed()}};
      },
      [this](const Values& values) {
        stage_ = value_of<int64_t>(values, "stage");
        stage_steps_ = value_of<int64_t>(values, "stage_steps");
        state_.step = value_of<int64_t>(values, "step");
        state_.samples = value_of<int64_t>(values, "samples");
        state_.loss = value_of<double>(values, "loss");
        state_.epoch = value_of<int64_t>(values, "epoch");
        state_.skipped = value_of<int64_t>(values, "skipped");
        state_.evaluated_at = value_of<int64_t>(values, "evaluated_at");
        state_.metrics = unpacked_metrics(value_of<std::string>(values, "metrics"));
        best_seen_ = value_of<double>(values, "best_seen");
        has_seen_ = value_of<bool>(values, "has_seen");
        bad_evaluations_ = value_of<int64_t>(values, "bad_evaluations");
        best_saved_ = value_of<double>(values, "best_saved");
        has_saved_ = value_of<bool>(values, "has_saved");
        restored_watched_ = unpacked(value_of<std::string>(values, "watched"));
        restored_rates_ = unpacked_metrics(value_of<std::string>(values, "base_rates"));
        owe(value_of<std::string>(values, "owed"));
      });
}

// What was asked for and has not happened yet, as words. A stop is an undisturbed run's end, from
// which it goes on when it is started again.
std::string Training::owed() const {
  const bool is_preempted = ended_ == Ended::Preempted;
  std::string words;
  const auto add = [&](const char* word, bool is_owed) {
    if (is_owed) words += (words.empty() ? "" : " ") + std::string(word);
  };
  add("evaluation", owes_evaluation_);
  add("epoch", owes_epoch_);
  add("stop", owes_stop_ && is_preempted);
  add("next-evaluation", evaluate_now_ || requests_.wants_evaluation());
  add("next-stop", requests_.wants_stop() && is_preempted);
  add("next-save", requests_.wants_save());
  return words;
}

void Training::owe(const std::string& words) {
  std::istringstream all(saved_owed_ = words);
  for (std::string word; all >> word;) {
    if (word == "evaluation") owes_evaluation_ = true;
    if (word == "epoch") owes_epoch_ = true;
    if (word == "stop") owes_stop_ = true;
    if (word == "next-evaluation") requests_.evaluate();
    if (word == "next-stop") requests_.stop();
    if (word == "next-save") requests_.save();
  }
}

// The metric, and which value of it is better, of each number that evaluations are compared with.
std::map<std::string, std::string> Training::watched_metrics() const {
  Texts watched;
  if (const auto& early = options_.early_stopping) {
    watched[kEarly] = watch_text(early->metric, early->better);
  }
  if (const auto& best = options_.saving.best) {
    watched[kBest] = watch_text(best->metric, best->better);
  }
  for (const auto& part : parts_) {
    if (!part.plateau) continue;
    watched[plateau_of(part)] = watch_text(part.plateau_metric, part.plateau_options->better);
  }
  return watched;
}

// A number of another metric says nothing about this one.
void Training::forget_other_metrics(const std::vector<parallel::PlateauState>& unused) {
  const auto watched = watched_metrics();
  const auto is_another = [&](const std::string& who) {
    const auto now = watched.find(who);
    if (now == watched.end()) return false;
    const auto before = restored_watched_.find(who);
    if (before != restored_watched_.end() && before->second == now->second) return false;
    if (state_.is_main()) {
      log::info(
          fmt::format("[train] {} watches {}, and the checkpoint's watched {}: it begins anew", who,
                      now->second, before == restored_watched_.end() ? "nothing" : before->second));
    }
    return true;
  };
  if (is_another(kEarly)) {
    has_seen_ = false;
    bad_evaluations_ = 0;
  }
  if (is_another(kBest)) has_saved_ = false;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (is_another(plateau_of(parts_[i]))) parts_[i].plateau->restore(unused[i]);
  }
}

// What rank 0 finds in the directory, on all ranks; what it throws, too.
template <class Look>
std::string Training::seen_by_main(const Look& look) {
  std::string found = " ";
  if (state_.is_main()) {
    try {
      found += look();
    } catch (const std::exception& error) {
      found = std::string("-") + error.what();
    }
  }
  found = world_.group().broadcast_bytes(found, 0, {.label = "train: directory"});
  if (found.front() == '-') throw CheckpointError(found.substr(1));
  return found.substr(1);
}

bool Training::saves() const {
  const auto& saving = options_.saving;
  return saving.at_end || saving.every_steps > 0 || saving.every_epochs > 0 || saving.best;
}

// Before anything is restored, or written: what another job that resumes with the same checkpoints
// has trained until its first save would be lost.
void Training::claim_directory() {
  if (!saves()) return;
  seen_by_main([&] {
    directory_.emplace(checkpoint::FolderLock::of_checkpoints(options_.saving.directory));
    return "";
  });
}

void Training::restore() {
  if (!checkpoints_) return;
  claim_directory();
  const bool is_restarted = is_restarted_here();
  restore_state(is_restarted);
  owes_job_file_ = !is_restarted;  // of what a callback or a signal saves
  if (!is_restarted) begin_job();
}

void Training::restore_state(bool is_restarted) {
  const auto& saving = options_.saving;
  checkpoint::RestoreOptions older{
      .allow_missing = {"trainer/loss", "trainer/epoch", "trainer/base_rates", "trainer/watched",
                        "trainer/owed"},
      .allow_unexpected = {"trainer/lr_factor"}};
  for (const auto& part : parts_) {
    if (part.average) older.allow_missing.push_back(averages_of(part));
  }
  const auto given = optimizer_options();
  std::vector<parallel::PlateauState> unused;
  for (const auto& part : parts_) {
    unused.push_back(part.plateau ? part.plateau->state() : parallel::PlateauState());
  }
  if (!saving.resume_from.empty() && !is_restarted) {
    refuse_others();
    checkpoints_->restore(saving.resume_from, older);
    forget_other_metrics(unused);
    // The best of another directory, or one that was removed, is none of this run's.
    if (saving.best && has_saved_) has_saved_ = !best_in_directory().empty();
  } else if (saving.resume == Resume::Latest || is_restarted) {
    if (!checkpoints_->restore_latest(older)) return;
    forget_other_metrics(unused);
    state_.saved_at = state_.step;
  } else {
    refuse_others();
    return;
  }
  state_.resumed_at = state_.step;
  state_.resumed_samples = state_.samples;
  set_rates();
  if (state_.is_main()) warn_of_restored_options(given);
  for (auto& part : parts_) {
    if (!part.average || part.average->updates() > 0 || state_.step == 0) continue;
    part.average->restart();
    if (!state_.is_main()) continue;
    log::warn(
        fmt::format("[train] {}: the checkpoint has no averaged weights: the average begins "
                    "after step {}",
                    part.name, state_.step));
  }
  const auto& early = options_.early_stopping;
  if (early && bad_evaluations_ > early->patience) end(Ended::Early);
}

// The rates are those of the options: where another number of ranks resumes, they follow it. A step
// of more ranks takes more samples, so that the rest of the run has fewer; a schedule over the run
// stands where it would if all of it had been made on these ranks, and ends with the run.
void Training::set_rates() {
  const auto left = steps_left();
  const int64_t planned = state_.steps;
  if (left) state_.steps = state_.step + *left;
  for (auto& part : parts_) {
    if (part.schedule) {
      part.schedule->restore({.step = left ? planned - *left : part.schedule->state().step,
                              .base_lrs = part.base_rates});
      part.note_rates();
    }
    if (!part.plateau) continue;
    for (size_t i = 0; i < part.base_rates.size(); ++i) {
      auto& options = part.optimizer->param_groups()[i].options();
      const auto before = restored_rates_.find(fmt::format("{}/{}", part.name, i));
      if (before == restored_rates_.end() || before->second == 0) continue;
      options.set_lr(options.get_lr() * (part.base_rates[i] / before->second));
    }
  }
}

// What the options say, before a plateau has reduced it: by part and parameter group.
std::map<std::string, double> Training::base_rates() const {
  std::map<std::string, double> rates;
  for (const auto& part : parts_) {
    for (size_t i = 0; i < part.base_rates.size(); ++i) {
      rates[fmt::format("{}/{}", part.name, i)] = part.base_rates[i];
    }
  }
  return rates;
}

// A run among another's checkpoints would remove them as its own, unless it begins with one of
// them.
void Training::refuse_others() {
  const std::string &directory = options_.saving.directory, &from = options_.saving.resume_from;
  const std::string found = seen_by_main([&]() -> std::string {
    if (is_checkpoint_of(from, directory)) return "";
    return checkpoint::newest_checkpoint(directory).value_or("");
  });
  if (found.empty()) return;
  throw ConfigError(fmt::format(
      "[train] {} has checkpoints of a run already, such as {}: resume it "
      "(Resume::Latest{}; in a file checkpoint.resume: latest), give another directory, "
      "or remove this one",
      directory, found, from.empty() ? "" : " without resume_from"));
}

// Whether the launcher has started this job again, and it has saved in its directory before.
bool Training::is_restarted_here() {
  const auto& directory = options_.saving.directory;
  const auto found = seen_by_main([&] {
    return is_restarted_job(directory) && checkpoint::newest_checkpoint(directory) ? "own" : "";
  });
  return !found.empty();
}

// From here on a restart of this job resumes from what is newest in the directory. Where that is
// none of this run's, or only a callback or a signal may save, from its first checkpoint on: the
// name of a job before goes (where none may be saved, if it is the same, and no job works there).
void Training::begin_job() {
  const auto& directory = options_.saving.directory;
  const auto found = seen_by_main([&] {
    const bool goes_back = is_checkpoint_of(options_.saving.resume_from, directory);
    if (!goes_back && saves()) write_job_file(directory);
    const std::string file = directory + "/job.txt";
    if (goes_back && saves()) std::filesystem::remove(file);
    if (goes_back && !saves() && names_this_job(directory)) {
      try {  // it may not write, or a job of its name works there at present
        const auto alone = checkpoint::FolderLock::of_checkpoints(directory);
        std::filesystem::remove(file);
      } catch (const std::exception&) {
      }
    }
    return goes_back || !saves() ? "owes" : "";
  });
  owes_job_file_ = !found.empty();
}

void Training::write_own_job() {
  seen_by_main([&] {
    write_job_file(options_.saving.directory);
    return "";
  });
}

std::map<std::string, double> Training::metrics_of_step() const {
  std::map<std::string, double> metrics;
  if (state_.evaluated_at == state_.step) metrics = state_.metrics;
  metrics.emplace("train_loss", state_.loss);  // unless the evaluation measures what it calls so
  return metrics;
}

// The folder whose metric is that of the best evaluation; empty when there is none.
std::string Training::best_in_directory() {
  const auto& saving = options_.saving;
  const std::string name = seen_by_main([&] {
    std::string folder;
    if (!checkpoint::newest_checkpoint(saving.directory)) return folder;
    for (const auto& one : checkpoint::list_checkpoints(saving.directory).checkpoints) {
      // Of equals the newest, which is the one that is kept.
      const auto value = one.metrics.find(saving.best->metric);
      if (value != one.metrics.end() && value->second == best_saved_) {
        folder = one.name;
      }
    }
    return folder;
  });
  return name.empty() ? "" : saving.directory + "/" + name;
}

// What is written in the background is on the disk when this returns, or it throws.
void Training::finish_saving() {
  if (!checkpoints_) return;
  checkpoints_->finish();
  const auto& best = options_.saving.best;
  if (!best) return;
  best_folder_ = has_saved_ ? best_in_directory() : "";
  if (has_saved_ && best_folder_.empty() && state_.is_main()) {
    log::warn(fmt::format(
        "[train] the best checkpoint, whose {} is {}, is not in {} any more: was it removed? The "
        "models stay those of the last step",
        best->metric, best_saved_, options_.saving.directory));
  }
  if (!best->restore_at_end || best_folder_.empty()) return;
  checkpoint::Checkpointer models(world_.group(), options_.saving.directory);
  checkpoint::RestoreOptions options{.allow_missing = {}, .allow_unexpected = {"*"}};
  for (auto& part : parts_) {
    part.track_model(models);
    if (!part.average) continue;
    models.track(prefix_of(part) + "average", *part.average);
    options.allow_missing.push_back(averages_of(part));
    part.average->restart();
  }
  models.restore(best_folder_, options);
  // That of an older run may have none.
  for (auto& part : parts_) {
    if (part.average && part.average->updates() == 0) part.average->restart();
  }
}

}  // namespace lockstep::train

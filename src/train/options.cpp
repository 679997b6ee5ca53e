#include "train/options.h"

#include <fmt/format.h>

#include <filesystem>
#include <set>
#include <string>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::train {
namespace {

void need(bool holds, const std::string& otherwise) {
  if (!holds) throw ConfigError("[train] " + otherwise);
}

void check_numbers(const TrainerOptions& o) {
  need(o.epochs >= 0 && o.max_steps >= 0 && o.max_time.count() >= 0,
       fmt::format("epochs {}, max_steps {} and max_time {} ms: none may be below 0", o.epochs,
                   o.max_steps, o.max_time.count()));
  for (size_t i = 0; i < o.callbacks.size(); ++i) {
    need(o.callbacks[i] != nullptr, fmt::format("callbacks[{}] is empty", i));
  }
  for (size_t i = 0; i < o.evaluation.metrics.size(); ++i) {
    need(o.evaluation.metrics[i] != nullptr, fmt::format("evaluation.metrics[{}] is empty", i));
  }
  need(o.accumulation >= 1, fmt::format("accumulation = {}: at least 1", o.accumulation));
  need(o.max_grad_norm >= 0,
       fmt::format("max_grad_norm = {}: above 0, or 0 to leave gradients as they are",
                   o.max_grad_norm));
  need(o.evaluation.every_epochs >= 0 && o.evaluation.every_steps >= 0 &&
           o.evaluation.batch_size >= 0,
       "evaluation: no number may be below 0");
  need(o.saving.every_epochs >= 0 && o.saving.every_steps >= 0 && o.saving.keep_last >= 0,
       "saving: no number may be below 0");
  if (o.early_stopping) {
    need(o.early_stopping->patience >= 0 && o.early_stopping->min_delta >= 0,
         "early_stopping: patience and min_delta may not be below 0");
  }
}

void check_length(const TrainerOptions& o, const DataSource& data) {
  if (o.stages.empty()) {
    need(static_cast<bool>(data), "there is no data to train on");
    need(o.epochs > 0 || o.max_steps > 0 || o.max_time.count() > 0,
         "the run has no end: give epochs, max_steps or max_time");
    return;
  }
  need(o.epochs == 0, "stages have epochs or steps of their own: leave out epochs");
  std::set<std::string> names;
  for (const auto& stage : o.stages) {
    need(!stage.name.empty() && stage.name.find('/') == std::string::npos,
         fmt::format("a stage's name is '{}': it has a letter at least, and no '/'", stage.name));
    need(names.insert(stage.name).second,
         fmt::format("two stages are called '{}': give them names of their own", stage.name));
    need(static_cast<bool>(stage.data), fmt::format("stage '{}' has no data", stage.name));
    need((stage.epochs > 0) != (stage.steps > 0) && stage.epochs >= 0 && stage.steps >= 0,
         fmt::format("stage '{}' has epochs {} and steps {}: give one of them, above 0", stage.name,
                     stage.epochs, stage.steps));
  }
}

void check_parts(const TrainerOptions& o, const std::vector<Part>& parts) {
  need(!parts.empty(), "there is no model to train");
  std::set<std::string> names;
  for (const auto& part : parts) {
    need(!part.name.empty() && part.name.find('/') == std::string::npos,
         fmt::format("a part's name is '{}': it has a letter at least, and no '/'", part.name));
    need(names.insert(part.name).second, fmt::format("two parts are called '{}'", part.name));
    need(static_cast<bool>(part.model), fmt::format("part '{}' has no model", part.name));
    need(part.optimizer || o.optimizer,
         fmt::format("part '{}' has no optimizer: give one, such as adamw()", part.name));
  }
  if (parts.size() == 1) return;
  need(o.loader.lanes == 0,
       "several models together with lanes: one update's lanes would have to be those of all the "
       "models that its loss goes through; train without lanes, or write the loop (Ddp::lanes() "
       "takes several)");
  need(!o.ddp.hook,
       "several models and one communication hook: a hook belongs to one of them; leave it out");
  need(!o.groups, "several models and one function for parameter groups: leave it out");
  need(!o.evaluation.data || o.evaluation.measure,
       "an evaluation of several models needs Evaluation::measure, which says what is computed");
}

// What an Fsdp has instead of Ddp's options, and what it lacks.
void check_fsdp(const TrainerOptions& o, const std::vector<Part>& parts) {
  if (!o.fsdp) return;
  need(!o.zero, "fsdp together with zero: an Fsdp shards the optimizer's state already");
  need(!o.ddp.hook, "fsdp together with a communication hook, which is Ddp's: leave out one");
  const parallel::DdpOptions plain;
  need(o.ddp.bucket_bytes == plain.bucket_bytes && o.ddp.unused == plain.unused &&
           o.ddp.buffers == plain.buffers && !o.ddp.reduce_dtype && o.ddp.sparse.empty() &&
           o.ddp.check_same_every == 0 && o.ddp.threads == plain.threads,
       "fsdp together with options of Ddp, which it takes the place of: set those of `fsdp`");
  need(o.fsdp->ignore.empty(),
       "fsdp.ignore lets ranks have parameters of their own, and evaluations, clipping and "
       "checkpoints are of one model: write the loop");
  need(o.fsdp->buffers != parallel::Buffers::None,
       "Buffers::None lets ranks have buffers of their own, and evaluations and checkpoints are of "
       "one model: use Buffers::Broadcast or Average, or write the loop");
  std::set<const torch::nn::Module*> modules;
  for (const auto& part : parts) {
    for (const auto& each : part.model.module().modules()) modules.insert(each.get());
  }
  for (const auto& unit : o.fsdp->units) {
    need(unit != nullptr && modules.contains(unit.get()),
         "fsdp.units has a module that belongs to no model of the training");
  }
}

void check_combinations(const TrainerOptions& o, const comm::Group& group) {
  need(!o.loader.exact,
       "loader.exact gives ranks different numbers of batches: it is for evaluations, which are "
       "exact in any case; leave it out");
  need(o.ddp.lanes == 0 || o.ddp.lanes == o.loader.lanes,
       fmt::format("ddp.lanes = {} and loader.lanes = {}: set the loader's", o.ddp.lanes,
                   o.loader.lanes));
  need(!o.fsdp || o.fsdp->lanes == 0 || o.fsdp->lanes == o.loader.lanes,
       fmt::format("fsdp.lanes = {} and loader.lanes = {}: set the loader's",
                   o.fsdp ? o.fsdp->lanes : 0, o.loader.lanes));
  need(o.ddp.ignore.empty(),
       "ddp.ignore lets ranks have parameters of their own, and evaluations, clipping and "
       "checkpoints are of one model: write the loop");
  need(o.ddp.buffers != parallel::Buffers::None,
       "Buffers::None lets ranks have buffers of their own, and evaluations and checkpoints are of "
       "one model: use Buffers::Broadcast or Average, or write the loop");
  need(!o.ddp.hook || !o.ddp.hook->subgroup(),
       fmt::format("the hook {} lets ranks train apart, and evaluations and checkpoints are of one "
                   "model: write the loop, with an Averager",
                   o.ddp.hook ? o.ddp.hook->name() : ""));
  if (o.sync_batch_norm) {
    const int64_t ranks = *o.sync_batch_norm;
    need(ranks >= 0 && (ranks == 0 || group.size() % ranks == 0),
         fmt::format("sync_batch_norm over groups of {} ranks: {} ranks cannot be divided so; give "
                     "a divisor, or 0 for all",
                     ranks, group.size()));
    need(o.loader.lanes == 0,
         "sync_batch_norm together with lanes: its statistics are over ranks, and lanes give the "
         "same on any number of them; leave out one");
  }
  if (group.rank() == 0 && !o.loader.transforms.empty() && o.evaluation.data &&
      !o.evaluation.transforms) {
    log::warn(
        "[train] loader.transforms are of the samples to train on, and evaluations have none: give "
        "Evaluation::transforms, those of them that do not augment, or {} where none is "
        "wanted");
  }
  const auto& saving = o.saving;
  need(saving.on_preemption || o.notice == nullptr,
       "saving.on_preemption is false, and there is a notice: give one of them");
  need(!saving.directory.empty() || (saving.every_steps == 0 && saving.every_epochs == 0 &&
                                     !saving.best && saving.resume_from.empty()),
       "saving has no directory: give Saving::directory");
  need(!saving.best || o.evaluation.data,
       "the best checkpoint is that of an evaluation: give TrainerOptions::evaluation");
  need(!o.early_stopping || o.evaluation.data,
       "early stopping looks at evaluations: give TrainerOptions::evaluation");
}

// The lower is the default, and of these it would be the worst one that counts.
void warn_of_direction(std::string_view who, const std::string& metric, Better better) {
  static const std::set<std::string_view> kHigher = {"accuracy",  "auc",    "r2",
                                                     "precision", "recall", "f1"};
  const bool is_top_k = metric.starts_with("top_") && metric.ends_with("_accuracy");
  if (better == Better::Higher || !(is_top_k || kHigher.contains(metric))) return;
  log::warn(fmt::format("[train] {} takes the lower {} as the better one: give Better::Higher", who,
                        metric));
}

void warn_of_directions(const TrainerOptions& o, const std::vector<Part>& parts) {
  if (const auto& early = o.early_stopping) {
    warn_of_direction("early stopping", early->metric, early->better);
  }
  if (const auto& best = o.saving.best) {
    warn_of_direction("the best checkpoint", best->metric, best->better);
  }
  for (const auto& part : parts) {
    const auto& rate = part.learning_rate ? *part.learning_rate : o.learning_rate;
    if (rate.plateau) warn_of_direction("the schedule", rate.metric, rate.plateau->better);
  }
}

// Autocast leaves float64 as it is, as PyTorch's does.
void warn_of_precision(const TrainerOptions& o, const std::vector<Part>& parts) {
  if (o.precision == Precision::Full) return;
  for (const auto& part : parts) {
    for (const auto& parameter : part.model.module().parameters()) {
      if (parameter.scalar_type() != at::kDouble) return;
    }
  }
  log::warn(
      fmt::format("[train] precision {} has no effect: all parameters are float64, which mixed "
                  "precision leaves as they are. Convert the model and its data to float32",
                  o.precision == Precision::BFloat16 ? "bfloat16" : "float16"));
}

// One line for each, the same where the options are.
std::vector<std::string> lines_of(const TrainerOptions& o, const std::vector<Part>& parts,
                                  const DataSource& data) {
  std::vector<std::string> lines;
  const auto add = [&](std::string_view name, const auto& value) {
    lines.push_back(fmt::format("{} = {}", name, value));
  };
  for (const auto& part : parts) add("part", part.name);
  add("samples", data ? data.dataset()->size() : 0);
  add("epochs", o.epochs);
  add("max_steps", o.max_steps);
  add("max_time", o.max_time.count());
  add("loader.batch_size", o.loader.batch_size);
  add("loader.seed", o.loader.seed);
  add("loader.shuffle", o.loader.shuffle);
  add("loader.drop_last", o.loader.drop_last);
  add("loader.lanes", o.loader.lanes);
  add("loader.transforms", o.loader.transforms.size());
  for (const auto& stage : o.stages) {
    lines.push_back(fmt::format("stage {}: samples {}, epochs {}, steps {}, batch_size {}",
                                stage.name, stage.data.dataset()->size(), stage.epochs, stage.steps,
                                stage.batch_size));
  }
  add("accumulation", o.accumulation);
  add("count", static_cast<bool>(o.count));
  add("max_grad_norm", o.max_grad_norm);
  add("precision", static_cast<int>(o.precision));
  add("scaler.init_scale", o.scaler.init_scale);
  add("scaler.growth_factor", o.scaler.growth_factor);
  add("scaler.backoff_factor", o.scaler.backoff_factor);
  add("scaler.growth_interval", o.scaler.growth_interval);
  add("non_finite", static_cast<int>(o.non_finite));
  add("sync_batch_norm", o.sync_batch_norm.value_or(-1));
  add("zero", o.zero);
  add("fsdp", o.fsdp ? static_cast<int>(o.fsdp->sharding) : -1);
  add("lr_scaling", static_cast<int>(o.lr_scaling));
  add("ddp.unused", static_cast<int>(o.ddp.unused));
  add("ddp.hook", o.ddp.hook ? o.ddp.hook->name() : "none");
  add("evaluation.samples", o.evaluation.data ? o.evaluation.data.dataset()->size() : 0);
  add("evaluation.transforms", o.evaluation.transforms ? o.evaluation.transforms->size() : 0);
  for (const auto& metric : o.evaluation.metrics) add("evaluation.metric", metric->name());
  add("evaluation.batch_size", o.evaluation.batch_size);
  add("evaluation.every_epochs", o.evaluation.every_epochs);
  add("evaluation.every_steps", o.evaluation.every_steps);
  if (const auto& average = o.weight_average) {
    add("weight_average.decay", average->decay.value_or(-1));
    add("weight_average.start", average->start);
    add("weight_average.every", average->every);
    for (const int64_t before : {1, 1000}) {
      if (average->decay_of) add("weight_average.decay_of", average->decay_of(before));
    }
  }
  if (o.early_stopping) {
    add("early_stopping.metric", o.early_stopping->metric);
    add("early_stopping.better", static_cast<int>(o.early_stopping->better));
    add("early_stopping.patience", o.early_stopping->patience);
    add("early_stopping.min_delta", o.early_stopping->min_delta);
  }
  add("saving.directory", o.saving.directory);
  add("saving.every_steps", o.saving.every_steps);
  add("saving.every_epochs", o.saving.every_epochs);
  add("saving.at_end", o.saving.at_end);
  add("saving.keep_last", o.saving.keep_last);
  add("saving.async", o.saving.async);
  for (const auto& pattern : o.saving.each_rank) add("saving.each_rank", pattern);
  add("saving.on_preemption", o.saving.on_preemption);
  add("saving.resume", static_cast<int>(o.saving.resume));
  add("saving.resume_from", o.saving.resume_from);
  if (o.saving.best) {
    add("saving.best", o.saving.best->metric);
    add("saving.best.better", static_cast<int>(o.saving.best->better));
    add("saving.best.restore_at_end", o.saving.best->restore_at_end);
  }
  add("callbacks", o.callbacks.size());
  return lines;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

}  // namespace

void check_options(const TrainerOptions& options, const std::vector<Part>& parts,
                   const DataSource& data, const comm::Group& group) {
  check_numbers(options);
  check_length(options, data);
  check_parts(options, parts);
  check_fsdp(options, parts);
  check_combinations(options, group);
  if (group.rank() != 0) return;
  warn_of_directions(options, parts);
  warn_of_precision(options, parts);
}

void compare_options(const TrainerOptions& options, const std::vector<Part>& parts,
                     const DataSource& data, const comm::Group& group) {
  if (group.size() > 1) compare_lines(lines_of(options, parts, data), group);
}

void compare_lines(const std::vector<std::string>& lines, const comm::Group& group) {
  if (group.size() == 1) return;
  std::string mine;
  for (const auto& line : lines) mine += line + "\n";
  const auto all = group.all_gather_bytes(mine, {.label = "train: options"});
  const auto first = split(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const auto other = split(all[rank]);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto at = [i](const auto& all_of_rank) {
        return i < all_of_rank.size() ? all_of_rank[i] : "nothing more";
      };
      if (at(first) == at(other)) continue;
      throw ConfigError(fmt::format(
          "[train] the ranks have different options. First difference:\n  rank 0 has {}\n  rank {} "
          "has {}\nGive all ranks the same",
          at(first), rank, at(other)));
    }
  }
}

bool is_checkpoint_of(const std::string& folder, const std::string& directory) {
  namespace fs = std::filesystem;
  if (folder.empty()) return false;
  std::error_code error;
  const auto plain = [&](const fs::path& path) {
    const auto found = fs::weakly_canonical(fs::absolute(path), error);
    return error ? path : found;
  };
  if (fs::exists(folder, error)) return plain(folder + "/..") == plain(directory);
  // Its own "..", where it is gone, would be no folder.
  fs::path gone = fs::absolute(folder).lexically_normal();
  if (!gone.has_filename()) gone = gone.parent_path();
  return plain(gone.parent_path()) == plain(directory);
}

}  // namespace lockstep::train

// What an evaluation computes, and what follows from it.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <ranges>
#include <sstream>

#include "comm/together.h"
#include "core/divided_up.h"
#include "core/hash/mix.h"
#include "core/number.h"
#include "lockstep/core/error.h"
#include "lockstep/core/shard.h"
#include "lockstep/parallel/random.h"
#include "models/evaluation_mode.h"
#include "train/training.h"

namespace lockstep::train {
namespace {

// What a rank whose evaluation has failed gives in the place of its sums begins so.
constexpr char kFailed = '-';

// Sums over the samples of one lane (a rank, without lanes).
struct LaneSums {
  double count = 0;
  std::map<std::string, double> sums;
  bool has_names = false;

  // What some batches lack would count as 0 in the mean over all.
  void check_names(const std::map<std::string, double>& others) const {
    const auto key = [](const auto& item) { return item.first; };
    if (std::ranges::equal(sums, others, {}, key, key)) return;
    throw ConfigError(fmt::format(
        "[train] Evaluation::measure gives {} for one batch and {} for another: give the same "
        "names for each",
        fmt::join(std::views::keys(sums), ", "), fmt::join(std::views::keys(others), ", ")));
  }

  void add(const std::map<std::string, double>& means, double samples) {
    for (const auto& [name, mean] : means) {
      if (!has_names) sums[name] = 0;
      if (name.find_first_of("\t\n") == name.npos) continue;
      throw ConfigError("[train] Evaluation::measure gives a name with a tab or a line break");
    }
    has_names = true;
    check_names(means);
    count += samples;
    // Of no samples there is no mean.
    for (const auto& [name, mean] : means) sums[name] += samples > 0 ? mean * samples : 0;
  }
  void add(const LaneSums& other) {
    if (other.count == 0) return;  // of no samples, perhaps without names
    if (count > 0) check_names(other.sums);
    count += other.count;
    for (const auto& [name, sum] : other.sums) sums[name] += sum;
  }
  // "count name=sum name=sum\n", without loss of bits.
  std::string text() const {
    std::string all = number_text(count);
    for (const auto& [name, sum] : sums) all += fmt::format("\t{}\t{}", name, number_text(sum));
    return all + "\n";
  }
};

LaneSums parsed(const std::string& line) {
  LaneSums lane;
  std::istringstream fields(line);
  std::string name, value;
  std::getline(fields, value, '\t');
  lane.count = number_from(value).value();
  while (std::getline(fields, name, '\t') && std::getline(fields, value, '\t')) {
    lane.sums[name] = number_from(value).value();
  }
  return lane;
}

bool is_better(double value, double best, Better better, double by) {
  return better == Better::Lower ? value < best - by : value > best + by;
}

std::vector<data::Transform> transforms_of(const Evaluation& evaluation) {
  return evaluation.transforms.value_or(std::vector<data::Transform>());
}

// Random numbers of an evaluation's lane: none of a training lane's, and the same wherever a run
// makes the evaluation of that step.
parallel::Stream stream_of(int64_t seed, int64_t step, int64_t lane) {
  return {.seed = mix(~static_cast<uint64_t>(seed)), .step = step, .lane = lane};
}

double watched(const RunState& state, const std::string& metric, std::string_view who) {
  const auto found = state.metrics.find(metric);
  if (found != state.metrics.end()) return found->second;
  std::string names;
  for (const auto& [name, value] : state.metrics) names += (names.empty() ? "" : ", ") + name;
  throw ConfigError(fmt::format("[train] {} watches '{}', and the evaluation has {}", who, metric,
                                names.empty() ? "no metric" : names));
}

// Of `text`, the sums of this rank's lanes, and of the other ranks'. A collective. The sums are
// added in the lanes' order on every rank: the same bits everywhere, and with lanes on any number
// of ranks.
std::map<std::string, double> means_over_ranks(const std::string& text, const comm::World& world) {
  LaneSums total;
  for (const auto& of_rank : world.group().all_gather_bytes(text, {.label = "train: evaluation"})) {
    if (of_rank.starts_with(kFailed)) throw Error("[train] " + of_rank.substr(1));
    std::istringstream lines(of_rank);
    for (std::string line; std::getline(lines, line);) total.add(parsed(line));
  }
  if (total.count == 0) {
    throw DataError(
        "[train] the evaluation's data count nothing, so there is no mean: all targets are left "
        "out of the loss");
  }
  for (auto& [name, sum] : total.sums) sum /= total.count;
  return total.sums;
}

// A collective.
void add_values(std::map<std::string, double>& values, const Metric& metric,
                const comm::World& world) {
  for (const auto& [name, value] : metric.values(world)) {
    const double other = values.try_emplace(name, value).first->second;
    if (other == value || (std::isnan(other) && std::isnan(value))) continue;
    throw ConfigError(fmt::format(
        "[train] the evaluation gives '{}' twice, as {} and, by the metric {}, as {}: give one of "
        "the two another name",
        name, other, metric.name(), value));
  }
}

}  // namespace

void TrainedPart::settle_shards() {
  if (!fsdp || (!fsdp->is_unsharded() && !fsdp->shares_memory())) return;
  fsdp->unshard();
  fsdp->reshard();
}

AppliedAverages Training::apply_averages() {
  AppliedAverages applied;
  for (auto& part : parts_) {
    if (!part.average || part.average->is_applied()) continue;
    part.settle_shards();
    applied.add(*part.average);
  }
  return applied;
}

std::map<std::string, double> Training::evaluate_for_program() {
  if (!options_.evaluation.data) {
    throw ConfigError("[train] there is no data to evaluate with: give TrainerOptions::evaluation");
  }
  is_common_ = false;
  try {
    std::vector<parallel::Fsdp*> whole;
    for (auto& part : parts_) {
      if (part.fsdp && part.fsdp->is_unsharded()) whole.push_back(part.fsdp.get());
    }
    auto metrics = evaluate();
    for (auto* fsdp : whole) fsdp->unshard();
    return metrics;
  } catch (...) {
    if (is_common_) throw;
    if (options_.fsdp) {  // the others may be in a call of a unit
      tell_others("evaluation");
      throw;
    }
    comm::give_up(world_.group(), kFailed + failure_of("evaluation"),
                  {.label = "train: evaluation"});
    throw;
  }
}

std::map<std::string, double> Training::evaluate() {
  const auto& evaluation = options_.evaluation;
  const int64_t lanes = std::max<int64_t>(options_.loader.lanes, world_.size());
  const Range own = Shard{world_.rank(), world_.size()}.of(lanes);
  const at::NoGradGuard no_grad;
  const auto applied = apply_averages();
  models::EvaluationMode mode;
  for (auto& part : parts_) mode.add(part.model.module());
  for (const auto& metric : evaluation.metrics) metric->reset();
  std::string text;
  int64_t calls = 0;
  for (int64_t lane = own.begin; lane < own.end; ++lane) {
    // What the model draws here changes nothing of what the training draws next, which would
    // otherwise depend on how many evaluations there have been, and on how many ranks share them.
    const parallel::RandomStream stream(stream_of(options_.loader.seed, state_.step, lane),
                                        world_.device());
    data::Loader loader(evaluation.data.dataset(), Shard{lane, lanes},
                        {.batch_size = evaluation.batch_size > 0 ? evaluation.batch_size
                                                                 : options_.loader.batch_size,
                         .shuffle = false,
                         .exact = true,
                         .prefetch = options_.loader.prefetch,
                         .workers = options_.loader.workers,
                         .transforms = transforms_of(evaluation),
                         .device = options_.loader.device});
    LaneSums sums;
    for (const auto& batch : loader.epoch(0)) {
      sums.add(measured(batch), static_cast<double>(count_of(batch)));
      ++calls;
    }
    text += sums.text();
  }
  {
    const parallel::RandomStream stream(stream_of(options_.loader.seed, state_.step, lanes),
                                        world_.device());
    for (int64_t more = calls_for_others(calls, lanes); more > 0; --more) {
      measure_for_others(*evaluation.data.dataset());
    }
  }
  const CommonPart common(*this);
  auto values = means_over_ranks(text, world_);
  for (const auto& metric : evaluation.metrics) add_values(values, *metric, world_);
  return values;
}

std::map<std::string, double> Training::measured(const data::Batch& batch) const {
  const auto autocast = this->autocast();
  return options_.evaluation.measure(batch);
}

// Under Fsdp the ranks make the same calls of units, so that one which has run out of samples makes
// those of a rank that had most lanes, each with most samples.
int64_t Training::calls_for_others(int64_t own, int64_t lanes) const {
  if (!options_.fsdp) return 0;
  const auto& evaluation = options_.evaluation;
  const int64_t batch_size =
      evaluation.batch_size > 0 ? evaluation.batch_size : options_.loader.batch_size;
  const int64_t of_lane = divided_up(evaluation.data.dataset()->size(), lanes);
  return divided_up(lanes, world_.size()) * divided_up(of_lane, batch_size) - own;
}

// A sample that does not count.
void Training::measure_for_others(const data::Dataset& data) const {
  std::vector<MetricState> counts;
  for (const auto& metric : options_.evaluation.metrics) counts.push_back(metric->state());
  // One of the first samples, as a batch of its own.
  data::Loader loader(data, Shard{0, data.size()},
                      {.batch_size = 1,
                       .shuffle = false,
                       .exact = true,
                       .transforms = transforms_of(options_.evaluation),
                       .device = options_.loader.device});
  for (const auto& batch : loader.epoch(0)) measured(batch);
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto& metric = options_.evaluation.metrics[i];
    metric->reset();
    metric->add(counts[i]);
  }
}

// The same on all ranks, because the metrics are. An evaluation that a run has only because it was
// stopped there is none of the schedule's and early stopping's, which a run that resumes from there
// has as one that was not stopped.
void Training::judge() {
  for (auto& part : parts_) {
    if (!part.plateau) continue;
    const double value = watched(state_, part.plateau_metric, "the schedule");
    if (!is_extra_) part.plateau->step(value);
  }
  if (const auto& best = options_.saving.best; best && checkpoints_) {
    const double value = watched(state_, best->metric, "the best checkpoint");
    if (!std::isnan(value) && (!has_saved_ || is_better(value, best_saved_, best->better, 0))) {
      has_saved_ = true;
      best_saved_ = value;
      save_now_ = true;
    }
  }
  if (const auto& early = options_.early_stopping) {
    const double value = watched(state_, early->metric, "early stopping");
    if (is_extra_) return;
    if (!std::isnan(value) &&
        (!has_seen_ || is_better(value, best_seen_, early->better, early->min_delta))) {
      has_seen_ = true;
      best_seen_ = value;
      bad_evaluations_ = 0;
    } else if (++bad_evaluations_ > early->patience) {
      end(Ended::Early);
    }
  }
}

}  // namespace lockstep::train

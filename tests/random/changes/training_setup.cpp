// How a training is made, saved and restored.
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <stdexcept>

#include "lockstep/checkpoint/directory.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/stateful.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "random/changes/plain.h"
#include "random/changes/training.h"

namespace lockstep::test::changes {
namespace {

data::LoaderOptions loader_options(const Course& course, const Shard& part) {
  data::LoaderOptions options{.batch_size = kBatch / part.count,
                              .seed = static_cast<int64_t>(course.seed % 1000)};
  if (course.lanes > 0) options.lanes = course.lanes, options.batch_size = kBatch / course.lanes;
  return options;
}

data::TensorDataset data_set(const Course& course) {
  const auto [x, y] = samples_of(course.seed);
  return {x, y};
}

parallel::Buffers buffers_of(Shared shared) {
  return shared == Shared::None      ? parallel::Buffers::None
         : shared == Shared::Average ? parallel::Buffers::Average
                                     : parallel::Buffers::Broadcast;
}

CheckpointerOptions saving_options(const Course& course) {
  CheckpointerOptions options;
  if (course.buffers == Shared::None) options.each_rank = {"net/seen"};
  return options;
}

std::string hook_name(size_t model) { return fmt::format("hook{}", model); }

}  // namespace

Training::Training(const Course& course, Where where, const Group& group, size_t phase)
    : course_(course),
      where_(where),
      group_(group),
      number_(phase),
      phase_(course.phases[phase]),
      part_{group.rank(), group.size()},
      net_(course, mixed(course.seed, phase == 0 ? 0 : 1000 + group.rank())),
      data_(data_set(course)),
      loader_(data_, part_, loader_options(course, part_)),
      scaler_(group, {.init_scale = 8, .growth_interval = 2, .enabled = course.scaled}),
      averager_(net_, {{.group = group, .period = 2}}),
      groups_(groups_of(course)) {
  for (const auto& change : course.changes) {
    if (change.step >= course.begin(phase)) continue;
    net_->take(course, change);
    change_groups(course, change, groups_);
  }
  if (course.drops) {
    net_->noise = [](at::IntArrayRef sizes) { return at::rand(sizes, at::kDouble); };
    if (phase == 0) at::manual_seed(generator_seed(course, 0, group.rank()));
  }
  attach();
  make_optimizers({});
  begin_average();
}

void Training::attach() {
  Dice dice(phase_.seed);
  if (course_.normalized && (group_.size() > 1 || dice.one_in(2))) {
    parallel::convert_sync_batch_norm(net_, group_);
  }
  if (is_local() && !course_.has_ddp(number_)) return;
  const auto buffers = buffers_of(course_.buffers);
  if (is_on_ranks() && phase_.kind == Kind::Fsdp) {
    parallel::FsdpOptions options{.lanes = course_.lanes};
    for (const auto& block : net_->blocks) {
      if (dice.one_in(2)) options.units.push_back(block.ptr());
    }
    options.share_memory = dice.one_in(2);
    options.sharding = dice.one_in(2) ? parallel::Sharding::Gradients : parallel::Sharding::Full;
    if (group_.size() % 2 == 0 && dice.one_in(3)) options.shard_ranks = group_.size() / 2;
    shard_ranks_ = options.shard_ranks;
    using parallel::Offload;
    options.offload =
        dice.pick(std::vector{Offload::None, Offload::None, Offload::Cpu, Offload::File});
    if (options.offload == Offload::File) {
      options.offload_folder = std::filesystem::temp_directory_path();
    }
    if (phase_.narrow) options.param_dtype = at::kFloat;
    if (phase_.reduced) options.reduce_dtype = phase_.narrow ? at::kDouble : at::kFloat;
    options.buffers = buffers;
    fsdp_ = std::make_unique<parallel::Fsdp>(net_, group_, options);
    return;
  }
  parallel::DdpOptions options{.lanes = course_.lanes};
  options.bucket_bytes = {static_cast<int64_t>(1 + dice.below(100000))};
  options.check_same_every = dice.below(3);
  options.buffers = buffers;
  if (course_.is_strict) options.unused = parallel::Unused::Error;
  if (phase_.reduced && is_on_ranks()) options.reduce_dtype = at::kFloat;
  models_ = models_of(net_, course_.models);
  for (const auto& model : models_) {
    options.hook = hook();
    if (options.hook) hooks_.push_back(options.hook);
    if (is_local()) options.hook = local_hook();
    ddps_.push_back(std::make_unique<parallel::Ddp>(model, group_, options));
  }
}

std::shared_ptr<parallel::CommHook> Training::hook() const {
  if (!is_on_ranks() || !course_.has_hook(number_)) return nullptr;
  const auto cast = [&](at::ScalarType dtype) {
    return std::make_shared<parallel::CastHook>(
        dtype, parallel::CastOptions{.error_feedback = course_.feedback});
  };
  switch (course_.hook) {
    case Hook::Float:
      return cast(at::kFloat);
    case Hook::Half:
      return cast(at::kHalf);
    case Hook::BFloat:
      return cast(at::kBFloat16);
    case Hook::TopK:
      return std::make_shared<parallel::TopK>(
          parallel::TopKOptions{.fraction = 0.3, .error_feedback = course_.feedback});
    default:
      return std::make_shared<parallel::PowerSgd>(parallel::PowerSgdOptions{
          .rank = 2, .start_iteration = 2, .error_feedback = course_.feedback});
  }
}

std::shared_ptr<parallel::CommHook> Training::local_hook() const {
  parallel::LocalSgdOptions options{.start_iteration = phase_.local_from};
  if (phase_.in_pairs) options.subgroup = group_.split(group_.rank() / 2);
  return std::make_shared<parallel::LocalSgd>(options);
}

Named Training::weights() const {
  if (!fsdp_) return parameters_of(*net_);
  Named shards;
  for (const auto& shard : fsdp_->shards()) shards.emplace_back(shard.name, shard.shard);
  return shards;
}

std::vector<std::vector<Named>> Training::members() const {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, weight] : weights()) all[name] = weight;
  std::vector<std::vector<Named>> made(static_cast<size_t>(course_.optimizers));
  size_t i = 0;
  for (auto& group : members_of(*net_, groups_)) {
    // An Fsdp has no shard of what is new, and will refuse it.
    std::erase_if(group, [&](const auto& each) { return !all.contains(each.first); });
    for (auto& [name, weight] : group) weight = all[name];
    made[i++ % made.size()].push_back(std::move(group));
  }
  return made;
}

std::unique_ptr<Optimizer> Training::optimizer_of(std::vector<OptimizerParamGroup> groups) {
  const auto make = [name = phase_.optimizer](std::vector<OptimizerParamGroup> own) {
    return made(name, std::move(own));
  };
  const bool is_shared = phase_.kind == Kind::SharedZero;
  if (!is_on_ranks() || (phase_.kind != Kind::Zero && !is_shared)) return make(std::move(groups));
  auto zero = std::make_unique<parallel::ZeroOptimizer>(
      std::move(groups), group_, make, parallel::ZeroOptions{.share_parameters = is_shared});
  zeros_.push_back(zero.get());
  return zero;
}

void Training::make_optimizers(const std::vector<double>& rates) {
  schedulers_.clear();
  optimizers_.clear();
  zeros_.clear();
  for (const auto& some : members()) {
    std::vector<OptimizerParamGroup> groups;
    for (const auto& group : some) groups.push_back(group_of(group));
    optimizers_.push_back(optimizer_of(std::move(groups)));
  }
  for (size_t i = 0; i < rates.size(); ++i) group_at(i).options().set_lr(rates[i]);
  begin_schedule();
}

void Training::begin_schedule() {
  schedulers_.clear();
  if (course_.gamma == 1) return;
  for (auto& optimizer : optimizers_) {
    schedulers_.push_back(std::make_unique<parallel::LrScheduler>(
        *optimizer, parallel::exponential_lr(course_.gamma)));
  }
}

void Training::begin_average() {
  if (!course_.average) return;
  std::vector<at::Tensor> averaged;
  for (const auto& [name, weight] : weights()) averaged.push_back(weight);
  parallel::WeightAverageOptions options{
      .decay = course_.average, .start = course_.average_from, .every = course_.average_every};
  if (*course_.average == 1) options.decay.reset();
  average_ = std::make_unique<parallel::WeightAverage>(averaged, options);
}

// Those of the groups that there were and still are.
std::vector<double> Training::rates() {
  std::vector<double> rates;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const auto& own = optimizers_[i % optimizers_.size()]->param_groups();
    if (i / optimizers_.size() < own.size()) rates.push_back(group_at(i).options().get_lr());
  }
  return rates;
}

std::string Training::optimizer_name(size_t phase, int number) const {
  int fresh = 0;
  for (size_t i = 1; i <= phase; ++i) fresh += course_.is_fresh(i);
  return fmt::format("optimizer{}-{}", fresh, number);
}

std::unique_ptr<Checkpointer> Training::tracking(const std::string& folder, size_t phase,
                                                 const CheckpointerOptions& options) {
  auto checkpoints = std::make_unique<Checkpointer>(group_, folder, options);
  fsdp_ ? checkpoints->track("net", *fsdp_) : checkpoints->track("net", *net_);
  for (int i = 0; i < course_.optimizers && !is_local(); ++i) {
    const std::string name = optimizer_name(phase, i);
    const auto at = static_cast<size_t>(i);
    zeros_.empty() ? checkpoints->track(name, *optimizers_[at])
                   : checkpoints->track(name, *zeros_[at]);
    if (!schedulers_.empty()) checkpoints->track("schedule of " + name, *schedulers_[at]);
  }
  checkpoints->track("loader", loader_);
  checkpoints->track("scaler", scaler_);
  for (size_t i = 0; i < hooks_.size(); ++i) {
    checkpoints->track(hook_name(i), stateful(*hooks_[i], group_));
  }
  if (course_.drops) checkpoints->track_generators();
  if (course_.synchronized) checkpoints->track("averager", averager_);
  if (average_) checkpoints->track("average", *average_);
  return checkpoints;
}

std::unique_ptr<Checkpointer> Training::checkpointer(const std::string& folder) {
  CheckpointerOptions options = saving_options(course_);
  options.retention.keep_last = 1 + phase_.discarded;
  options.async = phase_.async;
  return tracking(folder, number_, options);
}

void Training::restore(const std::string& folder) {
  for (size_t i = 0; i < groups_.size(); ++i) group_at(i).options().set_lr(77);
  const Phase& before = course_.phases[number_ - 1];
  RestoreOptions options;
  if (course_.is_fresh(number_)) {
    for (int i = 0; i < course_.optimizers; ++i) {
      const auto now = optimizer_name(number_, i), old = optimizer_name(number_ - 1, i);
      options.allow_missing.insert(options.allow_missing.end(), {now, "schedule of " + now});
      options.allow_unexpected.insert(options.allow_unexpected.end(), {old, "schedule of " + old});
    }
  }
  const bool had_hook = course_.has_hook(number_ - 1);
  for (int i = 0; i < course_.models; ++i) {
    if (!hooks_.empty() && !had_hook) options.allow_missing.push_back(hook_name(i));
    if (hooks_.empty() && had_hook) options.allow_unexpected.push_back(hook_name(i));
  }
  const auto checkpoints = tracking(folder, number_, saving_options(course_));
  const int step = course_.begin(number_);
  int64_t restored = -1;
  if (before.discarded == 0) {
    const auto found = checkpoints->restore_latest(options);
    if (found) restored = found->step;
  } else {
    std::string older;
    for (const auto& each : checkpoint::list_checkpoints(folder).checkpoints) {
      if (each.step == step) older = folder + "/" + each.name;
    }
    restored = checkpoints->restore(older, options).step;
  }
  if (restored != step) throw std::runtime_error("another checkpoint was restored");
  if (course_.is_fresh(number_)) {
    for (size_t i = 0; i < groups_.size(); ++i) {
      group_at(i).options().set_lr(rate_of(phase_.optimizer));
    }
  }
  // Of these nothing is known but that they draw other numbers than the others.
  if (course_.drops && static_cast<size_t>(group_.rank()) >= before.ranks.size()) {
    at::manual_seed(generator_seed(course_, number_, group_.rank()));
  }
}

void Training::begin_again(size_t phase) {
  number_ = phase;
  phase_ = course_.phases[phase];
  loader_.restore(loader_.state());
  for (const auto& parameter : net_->parameters()) parameter.mutable_grad().reset();
  if (course_.is_fresh(phase)) make_optimizers({});
}

}  // namespace lockstep::test::changes

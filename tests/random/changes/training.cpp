#include "random/changes/training.h"

#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "lockstep/parallel/call.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/join.h"

namespace lockstep::test::changes {

void Training::run(size_t phase) {
  const int end = course_.begin(phase + 1);
  const int first = is_on_ranks() ? course_.first_joined(phase) : end;
  run_steps(course_.begin(phase), first);
  if (!phase_.joined.empty() && is_on_ranks()) run_joined(first, end);
  // The last average.
  if (is_local()) parallel::Averager(net_, {{.group = group_}}).step();
  const at::NoGradGuard no_grad;
  seen_of_ranks_ = at::empty({group_.size() * net_->seen.numel()}, at::kDouble);
  group_.all_gather(seen_of_ranks_, net_->seen.contiguous()).wait();
  if (is_local() && course_.buffers != Shared::None) group_.broadcast(net_->seen, 0).wait();
}

void Training::run_steps(int begin, int end) {
  for (int step = begin; step < end;) {
    const int64_t epoch = loader_.state().epoch;
    if (has_lanes()) {
      for (auto each : loader_.steps(epoch)) {
        before(step);
        fsdp_
            ? run_lanes(fsdp_->lanes(each), each, step)
            : run_lanes(ddps_.size() > 1 ? ddps_[0]->lanes(each, *ddps_[1]) : ddps_[0]->lanes(each),
                        each, step);
        after();
        if (++step == end) return;
      }
    } else {
      for (const auto& batch : loader_.epoch(epoch)) {
        before(step);
        backward(batch, step);
        after();
        if (++step == end) return;
      }
    }
  }
}

void Training::run_discarded(Checkpointer& checkpoints) {
  for (int i = 1; i <= phase_.discarded; ++i) {
    run_steps(-1, 0);
    checkpoints.save(course_.begin(number_ + 1) + i);
  }
}

void Training::run_joined(int begin, int end) {
  const bool has_rest = course_.scaled || course_.clip != Course::Clip::None || course_.average ||
                        course_.synchronized || course_.gamma != 1;
  overflows_ = false;
  change(begin, 0, 1);
  std::vector<std::reference_wrapper<parallel::Joinable>> joinables;
  for (auto& ddp : ddps_) joinables.emplace_back(*ddp);
  const bool all_join = !has_rest && !zeros_.empty();
  for (auto* zero : zeros_) {
    if (all_join) joinables.emplace_back(*zero);
  }
  parallel::Join join(joinables, {.divisor = phase_.divides_by_active ? parallel::Divisor::Active
                                                                      : parallel::Divisor::World});
  const int own = phase_.joined[static_cast<size_t>(group_.rank())];
  for (int step = begin; step < begin + own && step < end; ++step) {
    clear();
    const auto [x, y] = batch_of(course_.seed, step, group_.rank());
    run_backward(x, y, overflows_ && group_.rank() + 1 == group_.size());
    overflows_ = false;
    after();
  }
  all_join ? join.finish() : join.finish([&] { after(); });
}

void Training::change(int step, int begin, int end) {
  for (const auto& change : course_.changes) {
    if (change.step != step || change.part < begin || change.part >= end) continue;
    net_->take(course_, change);
    change_groups(course_, change, groups_);
    const bool is_told = change.told || !is_on_ranks();
    const bool is_other =
        change.what == What::Replace || change.what == What::Tie || change.what == What::TieWeight;
    if (change.what == What::Refresh || (is_told && (is_other || change.what == What::Thaw))) {
      for (auto& ddp : ddps_) ddp->refresh();
    }
    const bool drops = change.what == What::DropGroup;
    if (is_other || drops || change.what == What::AddGroup) follow(change.anew);
    if (drops) begin_schedule();
    overflows_ = overflows_ || change.what == What::Overflow;
    if (change.what == What::Rate) {
      group_at(static_cast<size_t>(change.block) % groups_.size())
          .options()
          .set_lr(rate_of(phase_.optimizer) * (1 + change.other));
    }
  }
}

// The optimizers take the model's parameters as they are now.
void Training::follow(bool anew) {
  if (anew) {
    make_optimizers(rates());
  } else {
    const auto now = members();
    for (size_t i = 0; i < now.size(); ++i) give_members(*optimizers_[i], now[i]);
  }
  begin_average();
}

void Training::clear() {
  if (course_.clear == Clear::Wrapper) {
    if (fsdp_) return fsdp_->zero_grad();
    for (auto& ddp : ddps_) ddp->zero_grad();
    return ddps_.empty() ? net_->zero_grad() : void();
  }
  for (auto& optimizer : optimizers_) optimizer->zero_grad(course_.clear == Clear::Optimizer);
}

void Training::before(int step) {
  if (course_.clears_first) clear();
  overflows_ = false;
  change(step, 0, 1);
  if (!course_.clears_first) clear();
}

void Training::backward(const data::Batch& batch, int step) {
  const int64_t count = batch.data.size(0) / course_.micros;
  for (int micro = 0; micro < course_.micros; ++micro) {
    std::vector<parallel::Hold> hold;
    const bool last = micro + 1 == course_.micros;
    if (micro > 0) change(step, micro, micro + 1);
    for (auto& ddp : ddps_) {
      if (!last) hold.push_back(ddp->hold());
    }
    if (!last && fsdp_) hold.push_back(fsdp_->hold());
    // One rank's loss is infinite.
    run_backward(batch.data.narrow(0, micro * count, count),
                 batch.target.narrow(0, micro * count, count),
                 overflows_ && part_.index + 1 == part_.count && last);
  }
}

void Training::run_backward(const at::Tensor& x, const at::Tensor& y, bool overflows) {
  auto loss = (lockstep::call(net_, x) - y).square().mean();
  if (overflows) loss = loss * INFINITY;
  scaler_.scale(loss).backward();
}

template <class Range>
void Training::run_lanes(Range&& own, const data::Step& lanes, int step) {
  int lane = static_cast<int>(lanes.lanes().begin), next = 1;
  for (const auto& [x, y] : own) {
    change(step, next, lane + 1);
    next = std::max(next, ++lane);
    run_backward(x, y, overflows_ && lane == course_.lanes);
  }
  change(step, next, course_.lanes);
}

void Training::clip() {
  if (course_.clip == Course::Clip::None) return;
  for (auto& optimizer : optimizers_) scaler_.unscale_(*optimizer);
  if (course_.clip == Course::Clip::Value) {
    std::vector<at::Tensor> all;
    for (const auto& [name, weight] : weights()) all.push_back(weight);
    parallel::clip_grad_value_(all, 0.02);
  } else if (fsdp_) {
    fsdp_->clip_grad_norm_(0.5);
  } else {
    parallel::clip_grad_norm_(net_->parameters(), 0.5);
  }
}

void Training::after() {
  clip();
  for (auto& optimizer : optimizers_) scaler_.step(*optimizer);
  scaler_.update();
  for (auto& scheduler : schedulers_) scheduler->step();
  if (course_.synchronized || is_local()) averager_.step();
  if (average_) average_->update();
}

Named Training::state() {
  if (fsdp_) fsdp_->unshard();
  Named all;
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : parameters_of(*net_)) {
    all.emplace_back(name, parameter.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true));
  }
  if (fsdp_) fsdp_->reshard();
  for (const auto& item : net_->named_buffers()) {
    if (course_.buffers == Shared::None && item.value().is_same(net_->seen)) continue;
    all.emplace_back(item.key(), item.value().to(at::kDouble, false, true));
  }
  if (!has_lanes()) all.emplace_back("what each rank has seen", seen_of_ranks_);
  all.emplace_back("averager's steps",
                   at::tensor(course_.synchronized ? averager_.steps() : int64_t{0}));
  all.emplace_back("rates", at::tensor(rates(), at::kDouble));
  const auto at = loader_.state();
  all.emplace_back("taken", at::tensor(at.epoch * kEpoch + at.position));
  const auto scale = scaler_.state();
  all.emplace_back("scale", at::tensor({scale.scale, double(scale.growth_tracker)}, at::kDouble));
  if (!average_) return all;
  // Of an Fsdp's parts all ranks' together.
  std::map<std::string, at::Tensor> averages;
  size_t i = 0;
  for (const auto& [name, weight] : weights()) averages[name] = average_->averages()[i++];
  for (const auto& [name, parameter] : parameters_of(*net_)) {
    at::Tensor whole = averages.at(name);
    if (fsdp_) {
      whole = at::zeros({parameter.numel()}, at::kDouble);
      for (const auto& shard : fsdp_->shards()) {
        if (shard.name != name) continue;
        whole.narrow(0, shard.begin, shard.shard.numel()).copy_(averages.at(name));
      }
      group_.all_reduce(whole).wait();
      if (shard_ranks_ > 0) whole = whole * shard_ranks_ / group_.size();  // replicas
    }
    all.emplace_back("average of " + name, whole.reshape(parameter.sizes()).clone());
  }
  return all;
}

}  // namespace lockstep::test::changes

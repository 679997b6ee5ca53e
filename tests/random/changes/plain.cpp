#include "random/changes/plain.h"

#include <fmt/format.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace lockstep::test::changes {
namespace {

struct Batch {
  int rank;
  at::Tensor x, y;
};

// One copy of the model, and what steps it.
struct Copy {
  Net net;
  Groups groups;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  std::vector<std::vector<double>> bases;  // of the rates, by optimizer
  std::vector<int> scheduled;              // steps of the schedule

  explicit Copy(const Course& course)
      : net(course, mixed(course.seed, 0)), groups(groups_of(course)) {}

  std::vector<std::vector<Named>> members() const {
    std::vector<std::vector<Named>> all(optimizers.size());
    size_t i = 0;
    for (auto& group : members_of(*net, groups)) all[i++ % all.size()].push_back(std::move(group));
    return all;
  }
  OptimizerParamGroup& group(size_t i) {
    return optimizers[i % optimizers.size()]->param_groups()[i / optimizers.size()];
  }
  std::vector<double> rates() {
    std::vector<double> all;
    for (size_t i = 0; i < groups.size(); ++i) all.push_back(group(i).options().get_lr());
    return all;
  }
  void begin_schedules() {
    scheduled.assign(optimizers.size(), 0);
    bases.assign(optimizers.size(), {});
    for (size_t i = 0; i < optimizers.size(); ++i) {
      for (const auto& group : optimizers[i]->param_groups()) {
        bases[i].push_back(group.options().get_lr());
      }
    }
  }
};

class Plain {
 public:
  Plain(const Course& course, size_t number, Plain* before)
      : course_(course),
        number_(number),
        phase_(course.phases[number]),
        ranks_(static_cast<int>(phase_.ranks.size())),
        samples_(samples_of(course.seed)) {
    const bool is_local = phase_.kind == Kind::Local;
    for (int i = 0; i < (is_local ? ranks_ : 1); ++i) copies_.push_back(made(before));
    if (before != nullptr) take_over(*before);
    for (int rank = static_cast<int>(generators_.size()); rank < ranks_; ++rank) {
      const uint64_t seed = generator_seed(course_, number_, rank);
      generators_.push_back(at::detail::createCPUGenerator(seed));
    }
    if (course_.has_hook(number)) {
      hook_.emplace(course_.hook, course_.feedback);
      hook_->begin(ranks_, before != nullptr && before->hook_ ? &*before->hook_ : nullptr,
                   parameters_of(*copies_[0].net));
    }
    if (averages_.empty()) begin_average();
  }

  void run() {
    const int first = course_.first_joined(number_), end = course_.begin(number_ + 1);
    for (int step = course_.begin(number_); step < first; ++step) {
      std::vector<std::vector<Batch>> micros;
      for (int micro = 0; micro < course_.micros; ++micro) micros.push_back(loaded(micro));
      ++taken_;
      run_step(step, micros, ranks_);
    }
    for (int step = first; step < end; ++step) {
      std::vector<Batch> some;
      for (int rank = 0; rank < ranks_; ++rank) {
        if (phase_.joined[static_cast<size_t>(rank)] <= step - first) continue;
        const auto [x, y] = batch_of(course_.seed, step, rank);
        some.push_back({rank, x, y});
      }
      run_step(step, {some}, phase_.divides_by_active ? static_cast<int>(some.size()) : ranks_);
    }
    if (phase_.kind == Kind::Local) average_copies();
  }

  Named state() {
    Copy& copy = copies_[0];
    Named all;
    for (const auto& [name, parameter] : parameters_of(*copy.net)) {
      all.emplace_back(name, parameter.detach().clone());
    }
    for (const auto& item : copy.net->named_buffers()) {
      all.emplace_back(item.key(), item.value().to(at::kDouble));
    }
    all.emplace_back("averager's steps", at::tensor(course_.synchronized ? done_ : int64_t{0}));
    all.emplace_back("rates", at::tensor(copy.rates(), at::kDouble));
    all.emplace_back("taken", at::tensor(taken_ * kBatch));
    all.emplace_back("scale", at::tensor({scale_, static_cast<double>(good_)}, at::kDouble));
    if (!course_.average) return all;
    for (const auto& [name, average] : averages_)
      all.emplace_back("average of " + name, average.clone());
    return all;
  }

 private:
  Copy made(Plain* before) {
    Copy copy(course_);
    for (const auto& change : course_.changes) {
      if (change.step >= course_.begin(number_)) continue;
      copy.net->take(course_, change);
      change_groups(course_, change, copy.groups);
    }
    make_optimizers(copy, {});
    if (before == nullptr) return copy;
    Copy& from = before->copies_[0];
    const at::NoGradGuard no_grad;
    for (const auto& item : copy.net->named_parameters()) {
      item.value().copy_(from.net->named_parameters()[item.key()]);
    }
    for (const auto& item : copy.net->named_buffers()) {
      item.value().copy_(from.net->named_buffers()[item.key()]);
    }
    if (course_.is_fresh(number_)) return copy;
    copy.bases = from.bases, copy.scheduled = from.scheduled;
    for (size_t i = 0; i < copy.groups.size(); ++i) {
      copy.group(i).options().set_lr(from.group(i).options().get_lr());
    }
    const auto old = parameters_of(*from.net);
    for (const auto& [name, parameter] : parameters_of(*copy.net)) {
      const auto was = std::ranges::find(old, name, &Named::value_type::first);
      for (size_t i = 0; i < copy.optimizers.size(); ++i) {
        const auto& states = from.optimizers[i]->state();
        const auto found = states.find(was->second.unsafeGetTensorImpl());
        if (found == states.end()) continue;
        copy.optimizers[i]->state()[parameter.unsafeGetTensorImpl()] = found->second->clone();
      }
    }
    return copy;
  }

  void take_over(Plain& before) {
    taken_ = before.taken_, done_ = before.done_, scale_ = before.scale_, good_ = before.good_;
    averages_ = before.averages_, averaged_ = before.averaged_;
    // Generators of ranks that are not in this phase are gone.
    generators_ = before.generators_;
    generators_.resize(std::min(generators_.size(), static_cast<size_t>(ranks_)));
  }

  void make_optimizers(Copy& copy, const std::vector<double>& rates) {
    const auto count = static_cast<size_t>(course_.optimizers);
    copy.optimizers.resize(count);
    const auto all = copy.members();
    for (size_t i = 0; i < count; ++i) {
      std::vector<OptimizerParamGroup> groups;
      for (const auto& group : all[i]) groups.push_back(group_of(group));
      copy.optimizers[i] = changes::made(family_of(phase_.optimizer), std::move(groups));
    }
    for (size_t i = 0; i < rates.size(); ++i) copy.group(i).options().set_lr(rates[i]);
    copy.begin_schedules();
  }

  // Rank `rank` has every so-many-th sample, from its own on.
  std::vector<Batch> loaded(int micro) const {
    const auto order = at::randperm(
        kEpoch,
        at::detail::createCPUGenerator(course_.seed % 1000 + static_cast<uint64_t>(taken_ / 3)));
    const auto rows = order.narrow(0, taken_ % 3 * kBatch, kBatch);
    std::vector<Batch> all;
    const int64_t count = kBatch / ranks_ / course_.micros;
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto own = rows.view({-1, ranks_}).select(1, rank).narrow(0, micro * count, count);
      all.push_back(
          {rank, samples_.first.index_select(0, own), samples_.second.index_select(0, own)});
    }
    return all;
  }

  void run_step(int step, const std::vector<std::vector<Batch>>& micros, int divisor) {
    const bool clears_first = course_.clears_first && step < course_.first_joined(number_);
    for (auto& copy : copies_) {
      if (clears_first) clear(copy);
    }
    overflows_ = false;
    change(step, /*within=*/false);
    for (auto& copy : copies_) {
      if (!clears_first) clear(copy);
    }
    const bool has_hook = hook_ && ranks_ > 1;
    const Named all = parameters_of(*copies_[0].net);
    std::vector<std::vector<at::Tensor>> each(static_cast<size_t>(ranks_));
    for (auto& own : each) {
      for (const auto& [name, parameter] : all) {
        own.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      }
    }
    const auto left = each;
    std::set<const void*> reached;
    for (size_t micro = 0; micro < micros.size(); ++micro) {
      const bool is_last = micro + 1 == micros.size();
      if (is_last) change(step, /*within=*/true);
      note_reached(reached);
      const at::Tensor seen = copies_[0].net->seen.clone();
      for (const auto& batch : parts(micros[micro])) {
        Copy& copy = copies_.size() > 1 ? copies_[static_cast<size_t>(batch.rank)] : copies_[0];
        copy.net->seen.copy_(seen);
        copy.net->noise = nullptr;
        if (course_.drops)
          copy.net->noise = [&](at::IntArrayRef sizes) { return noise(batch.rank, sizes); };
        auto& own = each[static_cast<size_t>(std::max(batch.rank, 0))];
        if (has_hook) {
          for (size_t i = 0; i < all.size(); ++i) all[i].second.mutable_grad() = own[i];
        }
        auto loss = (copy.net->forward(batch.x) - batch.y).square().mean();
        if (batch.rank >= 0 && copies_.size() == 1 && !has_hook) loss = loss / divisor;
        const bool is_it = batch.rank < 0 || batch.rank + 1 == ranks_;
        if (overflows_ && is_last && is_it) loss = loss * INFINITY;
        (course_.scaled ? loss * scale_ : loss).backward();
        if (has_hook) {
          for (size_t i = 0; i < all.size(); ++i) own[i] = all[i].second.grad();
        }
      }
    }
    if (has_hook) average(all, each, left[0], reached);
    rest_of_step();
  }

  // What one forward sees.
  std::vector<Batch> parts(const std::vector<Batch>& all) const {
    if (course_.lanes == 0 && !course_.normalized) return all;
    std::vector<at::Tensor> x, y;
    for (const auto& batch : all) x.push_back(batch.x), y.push_back(batch.y);
    return {{-1, at::cat(x), at::cat(y)}};
  }

  at::Tensor noise(int rank, at::IntArrayRef sizes) {
    const auto drawn = [&](int of, int64_t rows) {
      return at::rand({rows, sizes[1]}, generators_[static_cast<size_t>(of)], at::kDouble);
    };
    if (rank >= 0) return drawn(rank, sizes[0]);
    std::vector<at::Tensor> all;
    for (int each = 0; each < ranks_; ++each) all.push_back(drawn(each, sizes[0] / ranks_));
    return at::cat(all);
  }

  void note_reached(std::set<const void*>& reached) {
    const NetImpl& net = *copies_[0].net;
    for (int i = 0; i < kBlocks; ++i) {
      if (net.skipped.contains(i)) continue;
      for (const auto& parameter : net.blocks[static_cast<size_t>(i)]->parameters()) {
        if (parameter.requires_grad()) reached.insert(parameter.unsafeGetTensorImpl());
      }
    }
  }

  void average(const Named& all, const std::vector<std::vector<at::Tensor>>& each,
               const std::vector<at::Tensor>& left, const std::set<const void*>& reached) {
    Named some;
    std::vector<std::vector<at::Tensor>> gradients;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].second.mutable_grad() = left[i];
      if (!reached.contains(all[i].second.unsafeGetTensorImpl())) continue;
      some.push_back(all[i]);
      gradients.emplace_back();
      for (const auto& own : each) gradients.back().push_back(own[i]);
    }
    const auto averages = hook_->average(some, gradients);
    for (size_t i = 0; i < some.size(); ++i) some[i].second.mutable_grad() = averages[i].second;
  }

  void change(int step, bool within) {
    for (const auto& change : course_.changes) {
      if (change.step != step || change.within != within) continue;
      overflows_ = overflows_ || change.what == What::Overflow;
      for (auto& copy : copies_) {
        copy.net->take(course_, change);
        change_groups(course_, change, copy.groups);
      }
      const bool is_other = change.what == What::Replace || change.what == What::Tie ||
                            change.what == What::TieWeight;
      const bool is_told = change.told && (is_other || change.what == What::Thaw);
      if (hook_ && (is_told || change.what == What::Refresh)) {
        hook_->keep_attached(parameters_of(*copies_[0].net));
      }
      const bool regroups = change.what == What::AddGroup || change.what == What::DropGroup;
      for (auto& copy : copies_) {
        if (is_other || regroups) follow(copy, change);
        if (change.what == What::Rate) {
          copy.group(static_cast<size_t>(change.block) % copy.groups.size())
              .options()
              .set_lr(rate_of(phase_.optimizer) * (1 + change.other));
        }
      }
      if (is_other || regroups) begin_average();
    }
  }

  void follow(Copy& copy, const Change& change) {
    if (change.anew) return make_optimizers(copy, rates_before(copy));
    const auto all = copy.members();
    for (size_t i = 0; i < all.size(); ++i) give_members(*copy.optimizers[i], all[i]);
    if (change.what == What::DropGroup) copy.begin_schedules();
  }

  // Those of the groups that there were and still are.
  std::vector<double> rates_before(Copy& copy) const {
    std::vector<double> rates;
    for (size_t i = 0; i < copy.groups.size(); ++i) {
      const auto& own = copy.optimizers[i % copy.optimizers.size()]->param_groups();
      if (i / copy.optimizers.size() < own.size())
        rates.push_back(copy.group(i).options().get_lr());
    }
    return rates;
  }

  void clear(Copy& copy) const {
    if (course_.clear == Clear::Wrapper) return copy.net->zero_grad();
    for (auto& optimizer : copy.optimizers) optimizer->zero_grad(course_.clear == Clear::Optimizer);
  }

  void rest_of_step() {
    std::vector<bool> found(static_cast<size_t>(course_.optimizers));
    for (auto& copy : copies_) {
      for (size_t i = 0; i < found.size() && course_.scaled; ++i) {
        for (const auto& group : copy.optimizers[i]->param_groups()) {
          for (const auto& parameter : group.params()) {
            if (!parameter.grad().defined()) continue;
            parameter.mutable_grad().mul_(1 / scale_);
            found[i] = found[i] || !at::isfinite(parameter.grad()).all().item<bool>();
          }
        }
      }
      std::vector<at::Tensor> all;
      for (const auto& [name, parameter] : parameters_of(*copy.net)) all.push_back(parameter);
      if (course_.clip == Course::Clip::Norm) torch::nn::utils::clip_grad_norm_(all, 0.5);
      if (course_.clip == Course::Clip::Value) torch::nn::utils::clip_grad_value_(all, 0.02);
    }
    for (auto& copy : copies_) {
      for (size_t i = 0; i < found.size(); ++i) {
        if (!found[i]) copy.optimizers[i]->step();
        if (course_.gamma != 1) schedule(copy, i);
      }
    }
    if (course_.scaled) {
      const double was = scale_;
      const bool is_good = std::ranges::count(found, true) == 0;
      good_ = is_good ? good_ + 1 : 0;
      if (!is_good) scale_ *= 0.5;
      if (good_ == 2) scale_ *= 2, good_ = 0;
      if (hook_) hook_->rescale(scale_ / was);
    }
    ++done_;
    if (copies_.size() > 1 && ++local_ % 2 == 0) average_copies();
    if (!course_.average) return;
    ++averaged_;
    for (auto& [name, average] : averages_) {
      const at::Tensor now = copies_[0].net->named_parameters()[name].detach();
      const double by =
          *course_.average < 1 ? 1 - *course_.average : 1.0 / static_cast<double>(averaged_);
      average = averaged_ == 1 ? now.clone() : average + (now - average) * by;
    }
  }

  void schedule(Copy& copy, size_t i) const {
    auto& groups = copy.optimizers[i]->param_groups();
    for (size_t j = copy.bases[i].size(); j < groups.size(); ++j) {
      copy.bases[i].push_back(groups[j].options().get_lr());
    }
    const double factor = std::pow(course_.gamma, ++copy.scheduled[i]);
    for (size_t j = 0; j < groups.size(); ++j)
      groups[j].options().set_lr(copy.bases[i][j] * factor);
  }

  void begin_average() {
    if (!course_.average) return;
    averages_.clear();
    averaged_ = 0;
    for (const auto& [name, parameter] : parameters_of(*copies_[0].net)) {
      averages_.emplace_back(name, parameter.detach().clone());
    }
  }

  void average_copies() {
    const at::NoGradGuard no_grad;
    const auto count = static_cast<double>(copies_.size());
    std::vector<Named> all;
    for (auto& copy : copies_) all.push_back(parameters_of(*copy.net));
    for (size_t i = 0; i < all[0].size(); ++i) {
      at::Tensor sum = at::zeros_like(all[0][i].second);
      for (const auto& own : all) sum += own[i].second;
      for (const auto& own : all) own[i].second.copy_(sum / count);
    }
  }

  const Course& course_;
  size_t number_;
  const Phase& phase_;
  int ranks_;
  std::pair<at::Tensor, at::Tensor> samples_;
  std::vector<Copy> copies_;  // one, or each rank's
  std::vector<at::Generator> generators_;
  std::optional<PlainHook> hook_;
  Named averages_;
  int64_t averaged_ = 0, taken_ = 0, done_ = 0, good_ = 0, local_ = 0;
  double scale_ = 8;
  bool overflows_ = false;
};

}  // namespace

uint64_t generator_seed(const Course& course, size_t phase, int rank) {
  return mixed(course.seed, 400 + phase, static_cast<uint64_t>(rank)) >> 1;
}

Named in_plain_torch(const Course& course, size_t last) {
  std::unique_ptr<Plain> now;
  for (size_t phase = 0; phase <= last; ++phase) {
    auto next = std::make_unique<Plain>(course, phase, now.get());
    now = std::move(next);
    now->run();
  }
  return now->state();
}

}  // namespace lockstep::test::changes

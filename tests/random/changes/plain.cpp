#include "random/changes/plain.h"

#include <fmt/format.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "random/changes/plain_copy.h"
#include "random/changes/plain_seen.h"

namespace lockstep::test::changes {
namespace {

struct Batch {
  int rank;
  at::Tensor x, y;
};

class Plain {
 public:
  Plain(const Course& course, size_t number, Plain* before)
      : course_(course),
        number_(number),
        phase_(course.phases[number]),
        ranks_(static_cast<int>(phase_.ranks.size())),
        width_(course.lanes > 0 ? course.lanes : ranks_),
        samples_(samples_of(course.seed)),
        seen_(course, number, Net(course, 0)->seen, before != nullptr ? &before->seen_ : nullptr) {
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
      // One lane after the other.
      for (size_t lane = 1; course_.lanes > 0 && lane < micros[0].size(); ++lane) {
        micros.push_back({micros[0][lane]});
      }
      if (course_.lanes > 0) micros[0].resize(1);
      ++taken_;
      run_step(step, micros, width_);
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
    seen_.end_phase();
  }

  Named state() {
    PlainCopy& copy = copies_[0];
    Named all;
    for (const auto& [name, parameter] : parameters_of(*copy.net)) {
      all.emplace_back(name, parameter.detach().clone());
    }
    for (const auto& item : copy.net->named_buffers()) {
      const bool is_seen = item.value().is_same(copy.net->seen);
      if (is_seen && course_.buffers == Shared::None) continue;
      all.emplace_back(item.key(), is_seen ? seen_.first() : item.value().to(at::kDouble));
    }
    if (course_.lanes == 0) all.emplace_back("what each rank has seen", seen_.of_ranks());
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
  PlainCopy made(Plain* before) {
    PlainCopy copy(course_);
    for (const auto& change : course_.changes) {
      if (change.step >= course_.begin(number_)) continue;
      copy.net->take(course_, change);
      change_groups(course_, change, copy.groups);
    }
    copy.make_optimizers(family_of(phase_.optimizer), {});
    if (before == nullptr) return copy;
    PlainCopy& from = before->copies_[0];
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
    updates_ = before.updates_;
    // Generators of ranks that are not in this phase are gone.
    generators_ = before.generators_;
    generators_.resize(std::min(generators_.size(), static_cast<size_t>(ranks_)));
  }

  // A rank, or lane, has every so-many-th sample, from its own on.
  std::vector<Batch> loaded(int micro) const {
    const auto order = at::randperm(
        kEpoch,
        at::detail::createCPUGenerator(course_.seed % 1000 + static_cast<uint64_t>(taken_ / 3)));
    const auto rows = order.narrow(0, taken_ % 3 * kBatch, kBatch);
    std::vector<Batch> all;
    const int64_t count = kBatch / width_ / course_.micros;
    for (int rank = 0; rank < width_; ++rank) {
      const auto own = rows.view({-1, width_}).select(1, rank).narrow(0, micro * count, count);
      all.push_back(
          {rank, samples_.first.index_select(0, own), samples_.second.index_select(0, own)});
    }
    return all;
  }

  void run_step(int step, const std::vector<std::vector<Batch>>& micros, int divisor) {
    const bool clears_first = course_.clears_first && step < course_.first_joined(number_);
    for (auto& copy : copies_) {
      if (clears_first) copy.clear_gradients();
    }
    overflows_ = false;
    change(step, 0);
    for (auto& copy : copies_) {
      if (!clears_first) copy.clear_gradients();
    }
    const bool has_hook = hook_ && ranks_ > 1;
    const Named all = parameters_of(*copies_[0].net);
    const auto left = copies_of_gradients(all);
    std::vector<std::vector<at::Tensor>> each;
    for (int rank = 0; rank < ranks_; ++rank) {
      const bool has_batch = std::ranges::count(micros[0], rank, &Batch::rank) > 0;
      each.push_back(copies_of_gradients(all));
      for (size_t i = 0; i < all.size() && !has_batch; ++i) {
        each.back()[i] = at::zeros_like(all[i].second);
      }
    }
    std::set<const void*> reached;
    for (size_t micro = 0; micro < micros.size(); ++micro) {
      const bool is_last = micro + 1 == micros.size();
      if (micro > 0) change(step, static_cast<int>(micro));
      note_reached(reached);
      for (const auto& batch : micros[micro]) seen_.forward(batch.rank, batch.x);
      for (const auto& batch : parts(micros[micro])) {
        PlainCopy& copy =
            copies_.size() > 1 ? copies_[static_cast<size_t>(batch.rank)] : copies_[0];
        copy.net->noise = nullptr;
        if (course_.drops)
          copy.net->noise = [&](at::IntArrayRef sizes) { return noise(batch.rank, sizes); };
        const at::Tensor errors = (copy.net->forward(batch.x) - batch.y).square();
        // With a hook of all ranks' samples each rank's.
        const auto own_errors =
            batch.rank < 0 && has_hook ? errors.chunk(ranks_) : std::vector{errors};
        for (size_t i = 0; i < own_errors.size(); ++i) {
          const int rank = own_errors.size() > 1 ? static_cast<int>(i) : batch.rank;
          at::Tensor loss = own_errors[i].mean();
          if (rank >= 0 && copies_.size() == 1 && !has_hook) loss = loss / divisor;
          const bool is_it = rank < 0 || rank + 1 == width_;
          if (overflows_ && is_last && is_it) loss = loss * INFINITY;
          run_backward(loss, all, has_hook ? &each[static_cast<size_t>(rank)] : nullptr);
        }
      }
    }
    std::vector<int> present;
    for (const auto& batch : micros[0]) present.push_back(batch.rank);
    const auto count = static_cast<int>(present.size());
    if (has_hook) average(all, each, left, reached, {count, divisor});
    if (phase_.kind == Kind::Local && course_.has_ddp(number_)) average_gradients(reached);
    const bool is_quiet = phase_.kind == Kind::Local && passes_ >= phase_.local_from;
    seen_.end_pass(present, is_quiet);
    ++passes_;
    rest_of_step();
  }

  // Of copies, by LocalSgd.
  void average_gradients(const std::set<const void*>& reached) {
    std::vector<Named> all;
    for (auto& copy : copies_) all.push_back(parameters_of(*copy.net));
    const size_t width = passes_ < phase_.local_from ? all.size() : phase_.in_pairs ? 2 : 1;
    for (size_t i = 0; i < all[0].size(); ++i) {
      if (!reached.contains(all[0][i].second.unsafeGetTensorImpl())) continue;
      for (size_t begin = 0; begin < all.size(); begin += width) {
        const size_t end = std::min(begin + width, all.size());
        at::Tensor sum = at::zeros_like(all[0][i].second);
        for (size_t rank = begin; rank < end; ++rank) sum += all[rank][i].second.grad();
        for (size_t rank = begin; rank < end; ++rank) {
          all[rank][i].second.mutable_grad() = sum / static_cast<double>(end - begin);
        }
      }
    }
  }

  // As when a Ddp attaches itself again.
  void become_rank_zeros() {
    const at::NoGradGuard no_grad;
    const Named first = parameters_of(*copies_[0].net);
    for (auto& copy : copies_) {
      const Named own = parameters_of(*copy.net);
      for (size_t i = 0; i < own.size(); ++i) own[i].second.copy_(first[i].second);
    }
    seen_.become_rank_zeros();
  }

  // `own`: gradients that it adds to, in place of the parameters'.
  void run_backward(const at::Tensor& loss, const Named& all, std::vector<at::Tensor>* own) const {
    for (size_t i = 0; own != nullptr && i < all.size(); ++i) {
      all[i].second.mutable_grad() = (*own)[i];
    }
    (course_.scaled ? loss * scale_ : loss).backward({}, /*retain_graph=*/true);
    for (size_t i = 0; own != nullptr && i < all.size(); ++i) (*own)[i] = all[i].second.grad();
  }

  // What one forward sees.
  std::vector<Batch> parts(const std::vector<Batch>& all) const {
    if (!course_.normalized) return all;
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
    if (!net.norm) return;
    for (const auto& parameter : net.norm->parameters()) {
      reached.insert(parameter.unsafeGetTensorImpl());
    }
  }

  // Ranks with a batch, and by how many the sum of their gradients is divided.
  struct Weights {
    int present, divisor;
  };

  // Gradients that were left count in full, also for ranks without a batch.
  void average(const Named& all, const std::vector<std::vector<at::Tensor>>& each,
               const std::vector<at::Tensor>& left, const std::set<const void*>& reached,
               Weights weights) {
    Named some;
    std::vector<at::Tensor> left_of_some;
    std::vector<std::vector<at::Tensor>> gradients;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].second.mutable_grad() = left[i];
      if (!reached.contains(all[i].second.unsafeGetTensorImpl())) continue;
      some.push_back(all[i]);
      left_of_some.push_back(left[i]);
      gradients.emplace_back();
      for (const auto& own : each) gradients.back().push_back(own[i]);
    }
    const auto averages = hook_->average(some, gradients);
    const double divisor = weights.divisor, rest = divisor - weights.present;
    for (size_t i = 0; i < some.size(); ++i) {
      at::Tensor made = averages[i].second * (ranks_ / divisor);
      if (rest > 0 && left_of_some[i].defined()) made = made + left_of_some[i] * (rest / divisor);
      some[i].second.mutable_grad() = made;
    }
  }

  void change(int step, int part) {
    for (const auto& change : course_.changes) {
      if (change.step != step || change.part != part) continue;
      overflows_ = overflows_ || change.what == What::Overflow;
      for (auto& copy : copies_) {
        copy.net->take(course_, change);
        change_groups(course_, change, copy.groups);
      }
      const bool is_other = change.what == What::Replace || change.what == What::Tie ||
                            change.what == What::TieWeight;
      const bool is_told = change.told && (is_other || change.what == What::Thaw);
      const bool refreshes = is_told || change.what == What::Refresh;
      if (hook_ && refreshes) hook_->keep_attached(parameters_of(*copies_[0].net));
      if (refreshes && course_.has_ddp(number_)) become_rank_zeros();
      const bool regroups = change.what == What::AddGroup || change.what == What::DropGroup;
      for (auto& copy : copies_) {
        if (is_other || regroups) copy.follow(change, family_of(phase_.optimizer));
        if (change.what == What::Rate) {
          copy.group(static_cast<size_t>(change.block) % copy.groups.size())
              .options()
              .set_lr(rate_of(phase_.optimizer) * (1 + change.other));
        }
      }
      if (is_other || regroups) begin_average();
    }
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
        if (course_.gamma != 1) copy.schedule(i);
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
    const int64_t rest = updates_++ - course_.average_from;
    if (rest > 0 && rest % course_.average_every > 0) return;
    if (rest >= 0) ++averaged_;
    for (auto& [name, average] : averages_) {
      const at::Tensor now = copies_[0].net->named_parameters()[name].detach();
      const double by =
          *course_.average < 1 ? 1 - *course_.average : 1.0 / static_cast<double>(averaged_);
      average = averaged_ <= 1 ? now.clone() : average + (now - average) * by;
    }
  }

  void begin_average() {
    if (!course_.average) return;
    averages_.clear();
    updates_ = averaged_ = 0;
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
  int width_;  // ranks or lanes
  std::pair<at::Tensor, at::Tensor> samples_;
  PlainSeen seen_;                 // in the place of the copies' buffers
  std::vector<PlainCopy> copies_;  // one, or each rank's
  std::vector<at::Generator> generators_;
  std::optional<PlainHook> hook_;
  int passes_ = 0;
  Named averages_;
  int64_t updates_ = 0, averaged_ = 0, taken_ = 0, done_ = 0, good_ = 0, local_ = 0;
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

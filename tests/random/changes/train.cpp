#include "random/changes/train.h"

#include <fmt/format.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/averager.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/grad_scaler.h"
#include "lockstep/parallel/stateful.h"
#include "lockstep/parallel/weight_average.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "random/changes/net.h"

namespace lockstep::test::changes {
namespace {

// Where a training runs.
enum class Where {
  Ranks,
  OneProcess,  // plain libtorch, on whole batches
  Lanes,       // a group of one; the bits of all ranks' lanes
};

class Training {
 public:
  // As it is before step `begin`, but for values.
  Training(const Course& course, Where where, const Group& group, const Phase& phase, int begin)
      : course_(course),
        where_(where),
        group_(group),
        phase_(phase),
        part_{group.rank(), group.size()},
        net_(mixed(course.seed, begin == 0 ? 0 : 1000 + group.rank())),
        data_(samples_of(course.seed)),
        loader_(data_, part_, loader_options()),
        scaler_(group, {.init_scale = 8, .growth_interval = 2, .enabled = course.scaled}),
        averager_(net_, {{.group = group, .period = 2}}) {
    layout_.emplace_back();
    for (int block = 0; block < kBlocks; ++block) {
      if (std::ranges::count(course.late, block) == 0) layout_[0].push_back(block);
    }
    for (const int block : course.frozen) set_trainable(block, false);
    for (const auto& change : course.changes) {
      if (change.step < begin) change_model(change);
    }
    attach();
    make_optimizer({});
  }

  void run(int begin, int end) {
    for (int step = begin; step < end;) {
      const int64_t epoch = loader_.state().epoch;
      if (has_lanes()) {
        for (auto each : loader_.steps(epoch)) {
          before(step);
          fsdp_ ? run_lanes(*fsdp_, each) : run_lanes(*ddp_, each);
          after();
          if (++step == end) return;
        }
      } else {
        for (const auto& batch : loader_.epoch(epoch)) {
          before(step);
          backward(batch);
          after();
          if (++step == end) return;
        }
      }
    }
  }

  void checkpoint(const std::string& folder, int step) {
    CheckpointerOptions options;
    options.async = phase_.async;
    const auto checkpoints = tracking(folder, options);
    checkpoints->save(step);
    checkpoints->finish();
  }

  void restore(const std::string& folder, int step) {
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(77);
    const auto found = tracking(folder, {})->restore_latest();
    if (!found || found->step != step) throw std::runtime_error("another checkpoint was restored");
  }

  // As a program that ends and begins again.
  void end() {
    loader_.restore(loader_.state());
    for (const auto& parameter : net_->parameters()) parameter.mutable_grad().reset();
  }

  // What is to be the same on all ranks, and in one process.
  Named state() {
    if (fsdp_) fsdp_->unshard();
    Named all;
    const at::NoGradGuard no_grad;
    for (const auto& [name, parameter] : named()) all.emplace_back(name, parameter.clone());
    if (fsdp_) fsdp_->reshard();
    all.emplace_back("seen", net_->seen.clone());
    all.emplace_back("averager's steps", at::tensor(averager_.steps()));
    std::vector<double> numbers;
    for (auto& group : optimizer_->param_groups()) numbers.push_back(group.options().get_lr());
    all.emplace_back("rates", at::tensor(numbers, at::kDouble));
    const auto at = loader_.state();
    all.emplace_back("position", at::tensor({at.epoch, at.position}, at::kLong));
    const auto scale = scaler_.state();
    all.emplace_back("scale", at::tensor({scale.scale, double(scale.growth_tracker)}, at::kDouble));
    if (average_) {
      // Of an Fsdp's parts all ranks' together.
      std::map<std::string, at::Tensor> averages;
      size_t i = 0;
      for (const auto& [name, weight] : weights()) averages[name] = average_->averages()[i++];
      for (const auto& [name, parameter] : named()) {
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
    }
    return all;
  }

 private:
  bool has_lanes() const { return course_.lanes > 0 && where_ != Where::OneProcess; }
  bool is_zero() const { return phase_.kind == Kind::Zero || phase_.kind == Kind::SharedZero; }
  bool is_on_ranks() const { return where_ == Where::Ranks; }

  data::LoaderOptions loader_options() const {
    data::LoaderOptions options{.batch_size = kBatch / part_.count,
                                .seed = static_cast<int64_t>(course_.seed % 1000)};
    if (has_lanes()) options.lanes = course_.lanes, options.batch_size = kBatch / course_.lanes;
    return options;
  }

  // Each once, by its first name.
  Named named() const {
    Named once;
    for (const auto& item : net_->named_parameters()) {
      const auto is_it = [&](const auto& other) { return other.second.is_same(item.value()); };
      if (std::ranges::none_of(once, is_it)) once.emplace_back(item.key(), item.value());
    }
    return once;
  }
  // What an optimizer steps.
  Named weights() const {
    if (!fsdp_) return named();
    Named shards;
    for (const auto& shard : fsdp_->shards()) shards.emplace_back(shard.name, shard.shard);
    return shards;
  }

  void set_trainable(int block, bool trainable) {
    for (const auto& parameter : net_->blocks[static_cast<size_t>(block)]->parameters()) {
      parameter.set_requires_grad(trainable);
    }
  }

  void change_model(const Change& change) {
    BlockImpl& block = *net_->blocks[static_cast<size_t>(change.block)];
    switch (change.what) {
      case What::Freeze:
      case What::Thaw:
        return set_trainable(change.block, change.what == What::Thaw);
      case What::Replace:
        block.up = block.replace_module("up", up_layer(mixed(course_.seed, 200 + change.step)));
        return;
      case What::Tie:
        block.up = block.replace_module("up", net_->blocks[static_cast<size_t>(change.other)]->up);
        return;
      case What::Skip:
        if (!net_->skipped.erase(change.block)) net_->skipped.insert(change.block);
        return;
      case What::AddGroup:
        for (const auto& group : layout_) {
          if (std::ranges::count(group, change.block) > 0) return;
        }
        layout_.push_back({change.block});
        return;
      default:
        return;
    }
  }

  void attach() {
    Dice dice(phase_.seed);
    if (where_ == Where::OneProcess) return;
    if (is_on_ranks() && phase_.kind == Kind::Fsdp) {
      parallel::FsdpOptions options{.lanes = course_.lanes};
      for (const auto& block : net_->blocks) {
        if (dice.one_in(2)) options.units.push_back(block.ptr());
      }
      options.share_memory = dice.one_in(2);
      options.sharding = dice.one_in(2) ? parallel::Sharding::Gradients : parallel::Sharding::Full;
      if (group_.size() % 2 == 0 && dice.one_in(3)) options.shard_ranks = group_.size() / 2;
      shard_ranks_ = options.shard_ranks;
      fsdp_ = std::make_unique<parallel::Fsdp>(net_, group_, options);
      return;
    }
    parallel::DdpOptions options{.lanes = course_.lanes};
    options.bucket_bytes = {static_cast<int64_t>(1 + dice.below(100000))};
    options.check_same_every = dice.below(3);
    ddp_ = std::make_unique<parallel::Ddp>(net_, group_, options);
  }

  std::vector<OptimizerParamGroup> groups() const {
    std::map<std::string, at::Tensor> all;
    for (const auto& [name, weight] : weights()) all[name] = weight;
    std::vector<OptimizerParamGroup> made;
    std::set<std::string> taken;
    for (const auto& blocks : layout_) {
      std::vector<at::Tensor> some;
      for (const int block : blocks) {
        for (const auto& own : net_->blocks[static_cast<size_t>(block)]->parameters()) {
          for (const auto& [name, parameter] : named()) {
            // An Fsdp has no shard of what is new, and will refuse it.
            if (!parameter.is_same(own) || !all.contains(name)) continue;
            if (taken.insert(name).second) some.push_back(all[name]);
          }
        }
      }
      made.emplace_back(std::move(some));
    }
    return made;
  }

  void make_optimizer(const std::vector<double>& rates) {
    const auto make = [name = course_.optimizer](std::vector<OptimizerParamGroup> own) {
      return made(name, std::move(own));
    };
    optimizer_.reset();
    zero_ = nullptr;
    if (is_on_ranks() && is_zero()) {
      auto zero = std::make_unique<parallel::ZeroOptimizer>(
          groups(), group_, make,
          parallel::ZeroOptions{.share_parameters = phase_.kind == Kind::SharedZero});
      zero_ = zero.get();
      optimizer_ = std::move(zero);
    } else {
      optimizer_ = make(groups());
    }
    for (size_t i = 0; i < rates.size(); ++i) {
      optimizer_->param_groups()[i].options().set_lr(rates[i]);
    }
    begin_average();
  }

  // The optimizer takes the model's parameters as they are now.
  void follow(bool anew) {
    std::vector<double> rates;
    for (auto& group : optimizer_->param_groups()) rates.push_back(group.options().get_lr());
    if (anew) return make_optimizer(rates);
    const auto now = groups();
    std::set<const void*> kept;
    for (size_t i = 0; i < now.size(); ++i) {
      for (const auto& parameter : now[i].params()) kept.insert(parameter.unsafeGetTensorImpl());
      if (i < optimizer_->param_groups().size()) {
        optimizer_->param_groups()[i].params() = now[i].params();
      } else {
        optimizer_->add_param_group(OptimizerParamGroup(now[i].params()));
      }
    }
    std::vector<void*> gone;
    for (const auto& item : optimizer_->state()) {
      if (!kept.contains(item.first)) gone.push_back(item.first);
    }
    for (void* parameter : gone) optimizer_->state().erase(parameter);
    begin_average();
  }

  void begin_average() {
    if (!course_.averaged) return;
    std::vector<at::Tensor> averaged;
    for (const auto& [name, weight] : weights()) averaged.push_back(weight);
    average_ = std::make_unique<parallel::WeightAverage>(
        averaged, parallel::WeightAverageOptions{.decay = 0.7});
  }

  void clear() {
    if (course_.clear == Clear::Wrapper) {
      if (fsdp_) return fsdp_->zero_grad();
      if (ddp_) return ddp_->zero_grad();
      return net_->zero_grad();
    }
    optimizer_->zero_grad(course_.clear == Clear::Optimizer);
  }

  void before(int step) {
    if (course_.clears_first) clear();
    overflows_ = false;
    for (const auto& change : course_.changes) {
      if (change.step != step) continue;
      change_model(change);
      const bool is_told = change.told || !is_on_ranks();
      const bool is_other = change.what == What::Replace || change.what == What::Tie;
      if (ddp_ &&
          (change.what == What::Refresh || (is_told && (is_other || change.what == What::Thaw)))) {
        ddp_->refresh();
      }
      if (is_other || change.what == What::AddGroup) follow(change.anew);
      if (change.what == What::Overflow) overflows_ = true;
      auto& all = optimizer_->param_groups();
      if (change.what == What::Rate) {
        all[static_cast<size_t>(change.block) % all.size()].options().set_lr(
            rate_of(course_.optimizer) * (1 + change.other));
      }
    }
    if (!course_.clears_first) clear();
  }

  void backward(const data::Batch& batch) {
    for (int micro = 0; micro < course_.micros; ++micro) {
      std::vector<parallel::Hold> hold;
      const bool last = micro + 1 == course_.micros;
      if (!last && ddp_) hold.push_back(ddp_->hold());
      if (!last && fsdp_) hold.push_back(fsdp_->hold());
      at::Tensor x = batch.data, y = batch.target;
      if (is_on_ranks()) {
        const int64_t count = x.size(0) / course_.micros;
        x = x.narrow(0, micro * count, count), y = y.narrow(0, micro * count, count);
      }
      // One rank's is infinite, in one process the sum.
      run_backward(x, y, overflows_ && part_.index + 1 == part_.count && last);
    }
  }

  void run_backward(const at::Tensor& x, const at::Tensor& y, bool overflows) {
    auto loss = (lockstep::call(net_, x) - y).square().mean();
    if (overflows) loss = loss * INFINITY;
    scaler_.scale(loss).backward();
  }

  template <class Parallel>
  void run_lanes(Parallel& parallel, const data::Step& step) {
    int64_t lane = step.lanes().begin;
    for (const auto& [x, y] : parallel.lanes(step)) {
      run_backward(x, y, overflows_ && ++lane == course_.lanes);
    }
  }

  void after() {
    if (course_.clipped) {
      scaler_.unscale_(*optimizer_);
      if (fsdp_) {
        fsdp_->clip_grad_norm_(0.5);
      } else if (is_on_ranks() || where_ == Where::Lanes) {
        parallel::clip_grad_norm_(net_->parameters(), 0.5);
      } else {
        std::vector<at::Tensor> once;
        for (const auto& [name, parameter] : named()) once.push_back(parameter);
        torch::nn::utils::clip_grad_norm_(once, 0.5);
      }
    }
    scaler_.step(*optimizer_);
    scaler_.update();
    if (course_.synchronized) averager_.step();
    if (average_) average_->update();
  }

  std::unique_ptr<Checkpointer> tracking(const std::string& folder,
                                         const CheckpointerOptions& options) {
    auto checkpoints = std::make_unique<Checkpointer>(group_, folder, options);
    fsdp_ ? checkpoints->track("net", *fsdp_) : checkpoints->track("net", *net_);
    zero_ != nullptr ? checkpoints->track("optimizer", *zero_)
                     : checkpoints->track("optimizer", *optimizer_);
    checkpoints->track("loader", loader_);
    checkpoints->track("scaler", scaler_);
    if (course_.synchronized) checkpoints->track("averager", averager_);
    if (average_) checkpoints->track("average", *average_);
    return checkpoints;
  }

  const Course& course_;
  Where where_;
  Group group_;
  Phase phase_;
  Shard part_;
  Net net_;
  data::TensorDataset data_;
  data::Loader loader_;
  parallel::GradScaler scaler_;
  parallel::Averager averager_;
  int shard_ranks_ = 0;
  std::unique_ptr<parallel::Ddp> ddp_;
  std::unique_ptr<parallel::Fsdp> fsdp_;
  std::unique_ptr<Optimizer> optimizer_;
  parallel::ZeroOptimizer* zero_ = nullptr;  // the optimizer, if it is one
  std::unique_ptr<parallel::WeightAverage> average_;
  std::vector<std::vector<int>> layout_;  // blocks by the optimizer's group
  bool overflows_ = false;
};

Named in_one_process(const Course& course, size_t last, Where where) {
  Training training(course, where, Group(), course.phases[0], 0);
  for (size_t phase = 0; phase <= last; ++phase) {
    if (phase > 0) training.end();
    training.run(course.begin(phase), course.begin(phase + 1));
  }
  return training.state();
}

}  // namespace

std::string run_phase(const Course& course, size_t phase, const Group& group,
                      const std::string& folder) {
  const int begin = course.begin(phase), end = course.begin(phase + 1);
  Named got;
  {
    Training training(course, Where::Ranks, group, course.phases[phase], begin);
    if (begin > 0) training.restore(folder, begin);
    training.run(begin, end);
    if (phase + 1 < course.phases.size()) training.checkpoint(folder, end);
    got = training.state();
  }
  std::string error = difference(got, in_one_process(course, phase, Where::OneProcess), 1e-9);
  if (!error.empty()) error = "from one process: " + error;
  // An Fsdp adds up a norm in another order than a Ddp, and adds averages to gradients that were
  // left, where a Ddp averages their sums.
  const bool leaves = course.clear != Clear::Wrapper && !course.late.empty();
  const bool has_fsdp = std::ranges::count(course.phases, Kind::Fsdp, &Phase::kind) > 0;
  const bool is_exact = course.lanes > 0 && !((course.clipped || leaves) && has_fsdp);
  if (error.empty() && is_exact) {
    error = difference(got, in_one_process(course, phase, Where::Lanes), 0);
    if (!error.empty()) error = "from one rank's lanes: " + error;
  }
  const std::string own = bytes_of(got);
  if (group.broadcast_bytes(own, 0) != own && error.empty()) error = "from rank 0";
  return error;
}

}  // namespace lockstep::test::changes

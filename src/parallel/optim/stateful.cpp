#include "lockstep/parallel/stateful.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>

#include "checkpoint/part_of.h"
#include "comm/transport.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

using checkpoint::Names;
using checkpoint::PartOf;
using checkpoint::Piece;
using checkpoint::Saved;
using checkpoint::State;
using checkpoint::stateful_values;
using checkpoint::value_of;
using checkpoint::Values;

// Else it counts.
bool has_mean(at::ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); }

class HookOfRank : public Stateful {
 public:
  HookOfRank(CommHook& hook, const Group& group) : hook_(hook), group_(group) {}

  State state(const Names&) const override {
    State state{.values = {{checkpoint::kHookIsThere, true}}};
    for (const auto& [name, tensor] : hook_.state()) {
      state.pieces.push_back(piece(group_.rank(), name, tensor));
    }
    return state;
  }

  State destination(const Saved& saved, const Names&) override {
    const int size = group_.size();
    same_ranks_ = saved.world == size;
    ranks_ = static_cast<int>(saved.world);
    next_.clear();
    State state{.others = {"rank-*"}};
    // Checkpoints of before 0.1.0 do not say it.
    const bool is_there = saved.values.contains(checkpoint::kHookIsThere);
    if (is_there) state.values = {{checkpoint::kHookIsThere, true}};
    // A hook that counts its passes always has a state: this one was not saved, and the caller says
    // so. Another may have had none yet, and has none again.
    const auto counts = [](const auto& item) { return !has_mean(item.second.scalar_type()); };
    is_missing_ = saved.tensors.empty() && !(is_there && takes_nothing()) &&
                  std::ranges::any_of(hook_.state(), counts);
    if (is_missing_) {
      state.pieces = this->state({}).pieces;
      return state;
    }
    const auto want = [&](int rank) {
      const std::string prefix = fmt::format("rank-{}/", rank);
      for (const auto& [path, tensor] : saved.tensors) {
        if (!path.starts_with(prefix)) continue;
        const std::string name = path.substr(prefix.size());
        if (rank != group_.rank() && rank != 0 && is_common(name, tensor.dtype)) continue;
        auto& to = next_[name].emplace_back(at::empty(tensor.sizes, tensor.dtype));
        state.pieces.push_back(piece(rank, name, to));
      }
    };
    if (same_ranks_) {
      want(group_.rank());
    } else {
      for (int rank = 0; rank < ranks_; ++rank) want(rank);
    }
    if (!same_ranks_) refuse_unequal();
    std::map<std::string, at::Tensor> zeros;  // without memory
    for (const auto& [name, tensors] : next_) {
      zeros[name] = at::zeros({}, tensors.front().options()).expand(tensors.front().sizes());
    }
    if (!zeros.empty()) hook_.check(zeros);
    return state;
  }

  void restored(const State&) override {
    if (is_missing_) return;  // which was allowed
    std::map<std::string, at::Tensor> state;
    for (const auto& [name, tensors] : next_) {
      if (same_ranks_ || is_common(name, tensors.front().scalar_type())) {
        state[name] = tensors.front();
        continue;
      }
      at::Tensor sum = tensors.front().clone();
      for (size_t i = 1; i < tensors.size(); ++i) sum.add_(tensors[i]);
      state[name] = sum.div_(ranks_);
    }
    next_.clear();
    hook_.restore(state);
  }

 private:
  bool takes_nothing() const {
    try {
      hook_.check({});
      return true;
    } catch (const ConfigError&) {
      return false;
    }
  }

  static Piece piece(int rank, const std::string& name, const at::Tensor& tensor) {
    Piece piece = checkpoint::whole_piece(fmt::format("rank-{}/{}", rank, name), tensor);
    piece.held = checkpoint::Held::InParts;
    return piece;
  }

  // Not the sum over ranks, like an error left to send, but the same on all.
  bool is_common(const std::string& name, at::ScalarType type) const {
    return !has_mean(type) || hook_.is_same_on_all(name);
  }

  // A mean is of tensors that are alike.
  void refuse_unequal() const {
    for (const auto& [name, tensors] : next_) {
      if (is_common(name, tensors.front().scalar_type())) continue;
      for (const at::Tensor& one : tensors) {
        const at::Tensor& first = tensors.front();
        if (one.sizes() == first.sizes() && one.scalar_type() == first.scalar_type()) continue;
        throw ConfigError(fmt::format(
            "[{0}] '{1}' is of shape [{2}] and dtype {3} on one of the {4} ranks that saved it and "
            "of [{5}] and {6} on another, so {7} ranks cannot have their mean: restore on {4}, or "
            "let is_same_on_all(\"{1}\") be true, for the first rank's",
            hook_.name(), name, fmt::join(first.sizes(), ", "), comm::name_of(first.scalar_type()),
            ranks_, fmt::join(one.sizes(), ", "), comm::name_of(one.scalar_type()), group_.size()));
      }
    }
  }

  CommHook& hook_;
  Group group_;
  bool same_ranks_ = true;
  int ranks_ = 1;
  std::map<std::string, std::vector<at::Tensor>> next_;
  bool is_missing_ = false;  // between destination() and restored()
};

}  // namespace

class WeightAverageState : public Stateful {
 public:
  explicit WeightAverageState(WeightAverage& average) : average_(average) {}

  State state(const Names& names) const override {
    average_.check("save()");
    State state = counts();
    each(names, [&](const std::vector<std::string>& all, const PartOf* whole, const at::Tensor& a) {
      if (whole == nullptr) {
        state.pieces.push_back(checkpoint::whole_piece(all.front(), a));
      } else if (whole->saves && (a.numel() > 0 || whole->is_of_nothing())) {
        state.pieces.push_back(checkpoint::part_piece(all.front(), *whole, a));
      }
    });
    return state;
  }

  State destination(const Saved& saved, const Names& names) override {
    average_.check("restore()");
    State state = counts();
    next_.clear();
    each(names, [&](const std::vector<std::string>& all, const PartOf* whole, const at::Tensor& a) {
      const auto known = std::ranges::find_if(
          all, [&](const std::string& name) { return saved.tensors.contains(name); });
      const std::string& name = known == all.end() ? all.front() : *known;
      next_.push_back(a.clone());
      if (whole == nullptr) {
        state.pieces.push_back(checkpoint::whole_piece(name, next_.back()));
        return;
      }
      state.others.push_back(checkpoint::pattern_of(name));  // other ranks' parts
      if (a.numel() > 0) {
        state.pieces.push_back(checkpoint::part_piece(name, *whole, next_.back()));
      }
    });
    return state;
  }

  void restored(const State& state) override {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < next_.size(); ++i) average_.averages_[i].copy_(next_[i]);
    next_.clear();
    average_.updates_ = value_of<int64_t>(state.values, "updates");
    average_.averaged_ = value_of<int64_t>(state.values, "averaged");
  }

 private:
  State counts() const {
    return {.values = {{"updates", average_.updates_}, {"averaged", average_.averaged_}}};
  }

  // The names of each weight, the whole of which it is a part, and its average.
  template <class Look>
  void each(const Names& names, const Look& look) const {
    for (size_t i = 0; i < average_.weights_.size(); ++i) {
      auto all = names.all(average_.weights_[i]);
      if (all.empty()) all.push_back(std::to_string(i));
      look(all, checkpoint::part_of(average_.weights_[i]), average_.averages_[i]);
    }
  }

  WeightAverage& average_;
  std::vector<at::Tensor> next_;  // between destination() and restored()
};

std::shared_ptr<Stateful> stateful(WeightAverage& average) {
  return std::make_shared<WeightAverageState>(average);
}

std::shared_ptr<Stateful> stateful(GradScaler& scaler) {
  return stateful_values(
      [&scaler] {
        const auto state = scaler.state();
        return Values{{"scale", state.scale}, {"growth_tracker", state.growth_tracker}};
      },
      [&scaler](const Values& values) {
        scaler.restore(
            {value_of<double>(values, "scale"), value_of<int64_t>(values, "growth_tracker")});
      });
}

std::shared_ptr<Stateful> stateful(LrScheduler& scheduler) {
  const auto state_of = [](const Values& values) {
    return LrSchedulerState{value_of<int64_t>(values, "step"),
                            value_of<std::vector<double>>(values, "base_lrs")};
  };
  return stateful_values(
      [&scheduler] {
        const LrSchedulerState state = scheduler.state();
        return Values{{"step", state.step}, {"base_lrs", state.base_lrs}};
      },
      [&scheduler, state_of](const Values& values) { scheduler.restore(state_of(values)); },
      [&scheduler, state_of](const Values& values) { scheduler.check(state_of(values)); });
}

std::shared_ptr<Stateful> stateful(ReduceLrOnPlateau& scheduler) {
  return stateful_values(
      [&scheduler] {
        const auto& state = scheduler.state();
        return Values{{"best", state.best},
                      {"bad_steps", state.bad_steps},
                      {"cooldown_left", state.cooldown_left}};
      },
      [&scheduler](const Values& values) {
        scheduler.restore({value_of<double>(values, "best"), value_of<int64_t>(values, "bad_steps"),
                           value_of<int64_t>(values, "cooldown_left")});
      });
}

std::shared_ptr<Stateful> stateful(Averager& averager) {
  return stateful_values(
      [&averager] {
        return Values{{"steps", averager.steps()}};
      },
      [&averager](const Values& values) {
        averager.set_steps(value_of<int64_t>(values, "steps"));
      });
}

std::shared_ptr<Stateful> stateful(CommHook& hook, const Group& group) {
  return std::make_shared<HookOfRank>(hook, group);
}

}  // namespace lockstep::parallel

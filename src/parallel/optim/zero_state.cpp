#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <typeinfo>

#include "checkpoint/optimizer_fields.h"
#include "checkpoint/part_of.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/stateful.h"
#include "parallel/optim/zero_parts.h"

namespace lockstep::parallel {
namespace {

using checkpoint::Names;
using checkpoint::Piece;
using checkpoint::Saved;
using checkpoint::State;

}  // namespace

// The state of this rank's portions, named as that of whole parameters.
class ZeroState : public Stateful {
 public:
  explicit ZeroState(ZeroOptimizer& optimizer) : zero_(optimizer) {
    if (dynamic_cast<const Stateful*>(&inner()) != nullptr) {
      const auto& own = inner();
      throw ConfigError(fmt::format(
          "[checkpoint] {0} says itself what is saved of it, and a ZeroOptimizer, which gives it "
          "parts of the parameters, saves an optimizer's state by itself: use {0} as it is, "
          "without ZeroOptimizer",
          c10::demangle(typeid(own).name())));
    }
    checkpoint::refuse_unknown(inner(), checkpoint::Within::Zero);
  }

  State state(const Names& names) const override {
    checkpoint::refuse_unknown(inner(), checkpoint::Within::Zero);
    State state{.values = checkpoint::option_values(zero_)};
    each_portion([&](size_t index, const Range& range, const at::Tensor& leaf) {
      const auto found = inner().state().find(leaf.unsafeGetTensorImpl());
      if (found == inner().state().end()) return;
      for (const auto& [field, value] : checkpoint::fields_of(*found->second)) {
        const auto* tensor = std::get_if<at::Tensor*>(&value);
        if (tensor == nullptr) {
          // All ranks with a portion have the same count; the first one's is saved.
          if (range.begin > 0) continue;
          const auto count = at::scalar_tensor(*std::get<int64_t*>(value), at::kLong);
          state.pieces.push_back(count_piece(field + "/" + name_of(index, names), count));
        } else if ((*tensor)->defined()) {
          const std::string path = field + "/" + name_of(index, names);
          state.pieces.push_back(piece(path, index, range, in_memory_order(**tensor)));
        }
      }
    });
    return state;
  }

  State destination(const Saved& saved, const Names& names) override {
    const at::NoGradGuard no_grad;
    checkpoint::refuse_unknown(inner(), checkpoint::Within::Zero);
    State state{.values = checkpoint::option_values(zero_)};
    next_ = {};
    for (size_t i = 0; i < parts().parameters.size(); ++i) {
      state.others.push_back("*/" + checkpoint::pattern_of(name_in(saved, i, names)));
    }
    each_portion([&](size_t index, const Range& range, const at::Tensor& leaf) {
      auto next = checkpoint::new_state(inner());
      bool any = false;
      const std::string name = name_in(saved, index, names);
      for (const auto& [field, value] : checkpoint::fields_of(*next)) {
        const std::string path = field + "/" + name;
        if (!saved.tensors.contains(path)) continue;
        any = true;
        if (const auto* tensor = std::get_if<at::Tensor*>(&value)) {
          **tensor = at::zeros_like(leaf);
          state.pieces.push_back(piece(path, index, range, in_memory_order(**tensor)));
        } else {
          const auto count = at::zeros({}, at::kLong);
          next_.counts.emplace_back(std::get<int64_t*>(value), count);
          state.pieces.push_back(count_piece(path, count));
        }
      }
      if (any) {
        next_.states.emplace_back(leaf, std::move(next));
      } else if (checkpoint::needs_first_state(inner())) {
        next_.stay.push_back(leaf.unsafeGetTensorImpl());
      }
    });
    return state;
  }

  void restored(const State& state) override {
    checkpoint::set_options(zero_, state.values);
    next_.give_to(inner());
  }

  int divided_among() const override { return parts().group.size(); }

 private:
  ZeroOptimizer::Parts& parts() const { return *zero_.parts_; }
  Optimizer& inner() const { return *parts().optimizer; }

  // In a group of one the parameters are whole.
  template <class Look>
  void each_portion(const Look& look) const {
    for (const auto& [index, range, leaf] : parts().portions) look(index, range, leaf);
    if (parts().group.size() > 1) return;
    for (size_t i = 0; i < parts().parameters.size(); ++i) {
      const auto& parameter = parts().parameters[i];
      look(i, Range{0, parameter.numel()}, parameter);
    }
  }

  // As the same optimizer without ZeRO calls it.
  std::string name_of(size_t index, const Names& names) const {
    const auto& parameter = parts().parameters[index];
    if (const auto name = names.of(parameter)) return *name;
    const auto& groups = zero_.param_groups();
    for (size_t group = 0; group < groups.size(); ++group) {
      const auto& all = groups[group].params();
      for (size_t i = 0; i < all.size(); ++i) {
        if (all[i].is_same(parameter)) return fmt::format("{}/{}", group, i);
      }
    }
    return fmt::format("parameter/{}", index);
  }

  // As a checkpoint calls it, which may have it under another name of a tied parameter.
  std::string name_in(const Saved& saved, size_t index, const Names& names) const {
    const auto next = checkpoint::new_state(inner());
    return checkpoint::name_in(saved, names.all(parts().parameters[index]),
                               checkpoint::fields_of(*next), name_of(index, names));
  }

  Piece piece(const std::string& path, size_t index, const Range& range,
              const at::Tensor& values) const {
    const auto& parameter = parts().parameters[index];
    return {path, parameter.scalar_type(), parameter.sizes().vec(),
            checkpoint::parts_of(parameter.sizes().vec(), parameter.strides().vec(), range,
                                 values.detach()),
            checkpoint::Held::InParts};
  }
  static Piece count_piece(const std::string& name, const at::Tensor& count) {
    Piece piece = checkpoint::whole_piece(name, count);
    piece.held = checkpoint::Held::InParts;
    return piece;
  }

  ZeroOptimizer& zero_;
  checkpoint::NextStates next_;  // between destination() and restored()
};

std::shared_ptr<Stateful> stateful(ZeroOptimizer& optimizer) {
  return std::make_shared<ZeroState>(optimizer);
}

void track_zero_optimizers() {
  checkpoint::track_optimizers_by([](Optimizer& optimizer) -> std::shared_ptr<Stateful> {
    auto* zero = dynamic_cast<ZeroOptimizer*>(&optimizer);
    return zero == nullptr ? nullptr : stateful(*zero);
  });
}

}  // namespace lockstep::parallel

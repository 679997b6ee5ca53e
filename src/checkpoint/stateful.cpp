#include "lockstep/checkpoint/stateful.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "checkpoint/file_memory.h"
#include "checkpoint/optimizer_fields.h"
#include "checkpoint/part_of.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

class ModuleState : public Stateful {
 public:
  // `name` is for errors.
  explicit ModuleState(ModuleRef module, std::string name = "")
      : module_(std::move(module)), name_(std::move(name)) {}

  State state(const Names&) const override {
    State state;
    std::map<const at::TensorImpl*, std::string> seen;
    each([&](const std::string& name, const at::Tensor& tensor) {
      const auto [first, fresh] = seen.try_emplace(tensor.unsafeGetTensorImpl(), name);
      if (fresh) {
        state.pieces.push_back(whole_piece(name, tensor));
      } else {
        state.aliases[name] = first->second;
      }
    });
    return state;
  }

  void add_names(const std::string& prefix, Names& names) const override {
    each([&](const std::string& name, const at::Tensor& tensor) {
      names.add(tensor, prefix + "/" + name);
    });
  }

 private:
  template <class Look>
  void each(const Look& look) const {
    if (module_.has_expired()) {
      throw CheckpointError(fmt::format(
          "[checkpoint] the module that is tracked{} is not there any more: for the one in its "
          "place destroy this Checkpointer, which holds the directory, and make another",
          name_.empty() ? "" : " as " + name_));
    }
    for (const auto& tensors : {module_.parameters(), module_.buffers()}) {
      for (const auto& [name, tensor] : tensors) {
        if (tensor.defined()) look(name, tensor);
      }
    }
  }

  ModuleRef module_;
  std::string name_;
};

// Fields that a parameter's state may do without.
bool is_optional(const std::string& field) {
  return field == "max_exp_avg_sq" || field == "momentum_buffer" || field == "grad_avg";
}

// Nothing where another rank saves it.
std::optional<Piece> piece_of_part(const std::string& path, const PartOf& whole,
                                   const std::variant<at::Tensor*, int64_t*>& value) {
  if (const auto* tensor = std::get_if<at::Tensor*>(&value)) {
    const bool any = whole.range.size() > 0 || whole.is_of_nothing();
    if (!(*tensor)->defined() || !any) return std::nullopt;
    return part_piece(path, whole, **tensor);
  }
  // All ranks have the same count; that of the first part is saved.
  const bool is_first = whole.range.begin == 0 && (whole.range.size() > 0 || whole.is_of_nothing());
  if (!is_first) return std::nullopt;
  Piece piece = whole_piece(path, at::scalar_tensor(*std::get<int64_t*>(value), at::kLong));
  piece.held = Held::InParts;
  return piece;
}

class OptimizerState : public Stateful {
 public:
  explicit OptimizerState(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    refuse_unknown(optimizer);
  }

  State state(const Names& names) const override {
    refuse_unknown(optimizer_);
    State state{.values = option_values(optimizer_)};
    each(names, [&](const std::string& name, const at::Tensor& parameter) {
      const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer_.state().end()) return;
      const PartOf* whole = part_of(parameter);
      if (whole != nullptr && !whole->saves) return;
      for (const auto& [field, value] : fields_of(*found->second)) {
        const auto* tensor = std::get_if<at::Tensor*>(&value);
        const std::string path = field + "/" + name;
        if (whole != nullptr) {
          if (auto piece = piece_of_part(path, *whole, value)) {
            state.pieces.push_back(std::move(*piece));
          }
        } else if (tensor == nullptr) {
          state.pieces.push_back(
              whole_piece(path, at::scalar_tensor(*std::get<int64_t*>(value), at::kLong)));
        } else if ((*tensor)->defined()) {
          state.pieces.push_back(whole_piece(path, **tensor));
        }
      }
    });
    return state;
  }

  State destination(const Saved& saved, const Names& names) override {
    const at::NoGradGuard no_grad;
    refuse_unknown(optimizer_);
    State state{.values = option_values(optimizer_)};
    next_ = {};
    each(names, [&](const std::string& own_name, const at::Tensor& parameter) {
      auto next = new_state(optimizer_);
      const auto fields = fields_of(*next);
      const std::string name = name_in(saved, names.all(parameter), fields, own_name);
      const bool any = std::any_of(fields.begin(), fields.end(), [&](const auto& field) {
        return saved.tensors.contains(field.name + "/" + name);
      });
      const PartOf* whole = part_of(parameter);
      if (whole != nullptr) state.others.push_back("*/" + pattern_of(name));  // other ranks' parts
      if (!any) {  // it had no gradient yet, or was not there
        if (needs_first_state(optimizer_)) next_.stay.push_back(parameter.unsafeGetTensorImpl());
        return;
      }
      for (const auto& [field, value] : fields) {
        const std::string path = field + "/" + name;
        if (is_optional(field) && !saved.tensors.contains(path)) continue;
        if (const auto* tensor = std::get_if<at::Tensor*>(&value)) {
          **tensor = zeros_beside(parameter);
          if (whole == nullptr) {
            state.pieces.push_back(whole_piece(path, **tensor));
          } else if (whole->range.size() > 0) {
            state.pieces.push_back(part_piece(path, *whole, **tensor));
          }
        } else {
          const auto count = at::zeros({}, at::kLong);
          next_.counts.emplace_back(std::get<int64_t*>(value), count);
          state.pieces.push_back(whole_piece(path, count));
        }
      }
      next_.states.emplace_back(parameter, std::move(next));
    });
    return state;
  }

  void restored(const State& state) override {
    set_options(optimizer_, state.values);
    next_.give_to(optimizer_);
  }

 private:
  // Each parameter once.
  template <class Look>
  void each(const Names& names, const Look& look) const {
    std::set<const at::TensorImpl*> seen;
    const auto& groups = optimizer_.param_groups();
    for (size_t group = 0; group < groups.size(); ++group) {
      for (size_t i = 0; i < groups[group].params().size(); ++i) {
        const auto& parameter = groups[group].params()[i];
        if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        look(names.of(parameter).value_or(fmt::format("{}/{}", group, i)), parameter);
      }
    }
  }

  torch::optim::Optimizer& optimizer_;
  NextStates next_;  // between destination() and restored()
};

class TensorState : public Stateful {
 public:
  explicit TensorState(at::Tensor& tensor) : tensor_(tensor) {}
  // An undefined one is saved as nothing, and gets what was saved.
  State state(const Names&) const override { return described(tensor_); }
  State destination(const Saved& saved, const Names&) override {
    next_ = tensor_;
    const auto found = saved.tensors.find("tensor");
    if (!tensor_.defined() && found != saved.tensors.end()) {
      next_ = at::empty(found->second.sizes, found->second.dtype);
    }
    return described(next_);
  }
  void restored(const State&) override { tensor_ = std::exchange(next_, {}); }

 private:
  static State described(const at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    return {.pieces = {whole_piece("tensor", tensor)}};
  }

  at::Tensor& tensor_;
  at::Tensor next_;  // between destination() and restored()
};

class ScalerState : public Stateful {
 public:
  explicit ScalerState(data::StandardScaler& scaler) : scaler_(scaler) {}

  State state(const Names&) const override {
    if (!scaler_.is_fitted()) return {};
    return {.pieces = {whole_piece("mean", scaler_.mean()),
                       whole_piece("deviation", scaler_.deviation())}};
  }
  State destination(const Saved& saved, const Names&) override {
    next_.clear();
    State state;
    for (const char* name : {"mean", "deviation"}) {
      const auto found = saved.tensors.find(name);
      if (scaler_.is_fitted()) {
        next_.push_back(at::empty_like(scaler_.mean()));
      } else if (found != saved.tensors.end()) {
        next_.push_back(at::empty(found->second.sizes, at::kDouble));
      } else {
        continue;
      }
      state.pieces.push_back(whole_piece(name, next_.back()));
    }
    return state;
  }
  void restored(const State& state) override {
    if (state.pieces.size() == 2) scaler_.restore(next_[0], next_[1]);
    next_.clear();
  }

 private:
  data::StandardScaler& scaler_;
  std::vector<at::Tensor> next_;  // between destination() and restored()
};

template <class T>
std::shared_ptr<Stateful> number(T& value) {
  return stateful_values(
      [&value] {
        return Values{{"value", value}};
      },
      [&value](const Values& values) { value = value_of<T>(values, "value"); });
}

Values values_of(const data::SamplerState& state) {
  return {{"epoch", state.epoch},
          {"position", state.position},
          {"seed", state.seed},
          {"length", state.length},
          {"shuffle", state.shuffle}};
}

data::SamplerState place_of(const Values& values) {
  return {value_of<int64_t>(values, "epoch"), value_of<int64_t>(values, "position"),
          value_of<int64_t>(values, "seed"), value_of<int64_t>(values, "length"),
          value_of<bool>(values, "shuffle")};
}

template <class Sampler>
std::shared_ptr<Stateful> place_in_data(Sampler& sampler) {
  return stateful_values([&sampler] { return values_of(sampler.state()); },
                         [&sampler](const Values& values) { sampler.restore(place_of(values)); },
                         [&sampler](const Values& values) { sampler.check(place_of(values)); });
}

class TorchSamplerState : public Stateful {
 public:
  TorchSamplerState(data::TorchSampler& sampler, int64_t& taken)
      : sampler_(sampler), taken_(taken) {}

  State state(const Names&) const override {
    return {.values = values_of(sampler_.state_after(taken_))};
  }
  // The names alone: what has been counted so far does not matter.
  State destination(const Saved& saved, const Names&) override {
    State state{.values = values_of({})};
    if (saved.has_like(state.values)) sampler_.check(place_of(saved.values));
    return state;
  }
  void restored(const State& state) override {
    sampler_.restore(place_of(state.values));
    taken_ = 0;
  }

 private:
  data::TorchSampler& sampler_;
  int64_t& taken_;
};

}  // namespace

std::shared_ptr<Stateful> stateful(torch::nn::Module& module) {
  return std::make_shared<ModuleState>(module);
}
std::shared_ptr<Stateful> stateful(const torch::jit::Module& module) {
  return std::make_shared<ModuleState>(module);
}
std::shared_ptr<Stateful> stateful_module(const std::string& name,
                                          const std::shared_ptr<torch::nn::Module>& module) {
  if (module == nullptr) {
    throw ConfigError(fmt::format("[checkpoint] track(\"{}\") of an empty pointer", name));
  }
  return std::make_shared<ModuleState>(module, name);
}
std::shared_ptr<Stateful> stateful(torch::optim::Optimizer& optimizer) {
  if (auto tracked = tracked_by_its_class(optimizer)) return tracked;
  // Not kept, as any optimizer.
  if (auto* own = dynamic_cast<Stateful*>(&optimizer)) return {std::shared_ptr<void>(), own};
  return std::make_shared<OptimizerState>(optimizer);
}
std::shared_ptr<Stateful> stateful(data::Loader& loader) { return place_in_data(loader); }
std::shared_ptr<Stateful> stateful(data::DistributedSampler& sampler) {
  return place_in_data(sampler);
}
std::shared_ptr<Stateful> stateful(data::StandardScaler& scaler) {
  return std::make_shared<ScalerState>(scaler);
}
std::shared_ptr<Stateful> stateful(data::TorchSampler& sampler, int64_t& taken) {
  return std::make_shared<TorchSamplerState>(sampler, taken);
}
std::shared_ptr<Stateful> stateful(int64_t& value) { return number(value); }
std::shared_ptr<Stateful> stateful(double& value) { return number(value); }
std::shared_ptr<Stateful> stateful(bool& value) { return number(value); }
std::shared_ptr<Stateful> stateful(std::string& value) { return number(value); }
std::shared_ptr<Stateful> stateful(at::Tensor& tensor) {
  return std::make_shared<TensorState>(tensor);
}

}  // namespace lockstep::checkpoint

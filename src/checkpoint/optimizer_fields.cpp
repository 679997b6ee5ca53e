#include "checkpoint/optimizer_fields.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <typeinfo>

#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

using torch::optim::Optimizer;
using Betas = std::tuple<double, double>;
using Option = std::pair<const char*, std::variant<double*, bool*, Betas*>>;

template <class State>
std::vector<StateField> adam_fields(State& state) {
  return {{"step", &state.step()},
          {"exp_avg", &state.exp_avg()},
          {"exp_avg_sq", &state.exp_avg_sq()},
          {"max_exp_avg_sq", &state.max_exp_avg_sq()}};
}

template <class Options>
std::vector<Option> adam_options(Options& options) {
  return {{"lr", &options.lr()},
          {"betas", &options.betas()},
          {"eps", &options.eps()},
          {"weight_decay", &options.weight_decay()},
          {"amsgrad", &options.amsgrad()}};
}

// Refers into `options`.
std::vector<Option> options_of(torch::optim::OptimizerOptions& options) {
  using namespace torch::optim;
  if (auto* adam = dynamic_cast<AdamOptions*>(&options)) return adam_options(*adam);
  if (auto* adamw = dynamic_cast<AdamWOptions*>(&options)) return adam_options(*adamw);
  if (auto* sgd = dynamic_cast<SGDOptions*>(&options)) {
    return {{"lr", &sgd->lr()},
            {"momentum", &sgd->momentum()},
            {"dampening", &sgd->dampening()},
            {"weight_decay", &sgd->weight_decay()},
            {"nesterov", &sgd->nesterov()}};
  }
  if (auto* rmsprop = dynamic_cast<RMSpropOptions*>(&options)) {
    return {{"lr", &rmsprop->lr()},
            {"alpha", &rmsprop->alpha()},
            {"eps", &rmsprop->eps()},
            {"weight_decay", &rmsprop->weight_decay()},
            {"momentum", &rmsprop->momentum()},
            {"centered", &rmsprop->centered()}};
  }
  if (auto* adagrad = dynamic_cast<AdagradOptions*>(&options)) {
    return {{"lr", &adagrad->lr()},
            {"lr_decay", &adagrad->lr_decay()},
            {"weight_decay", &adagrad->weight_decay()},
            {"initial_accumulator_value", &adagrad->initial_accumulator_value()},
            {"eps", &adagrad->eps()}};
  }
  return {};
}

constexpr const char* kOwnOptimizer =
    "For another, write a function stateful() beside it (docs/resuming.md), and track it as an "
    "object of its own class; or derive the class from checkpoint::Stateful, too, as a Trainer "
    "needs it";

constexpr const char* kOwnWithinZero =
    "Within a ZeroOptimizer another has no names for the parts of its state: derive it from the "
    "class above that has the same state, or, where it is tracked, use it without ZeroOptimizer";

const char* advice(Within within) {
  return within == Within::Zero ? kOwnWithinZero : kOwnOptimizer;
}

}  // namespace

std::vector<StateField> fields_of(torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  if (auto* adam = dynamic_cast<AdamParamState*>(&state)) return adam_fields(*adam);
  if (auto* adamw = dynamic_cast<AdamWParamState*>(&state)) return adam_fields(*adamw);
  if (auto* sgd = dynamic_cast<SGDParamState*>(&state)) {
    return {{"momentum_buffer", &sgd->momentum_buffer()}};
  }
  if (auto* rmsprop = dynamic_cast<RMSpropParamState*>(&state)) {
    return {{"step", &rmsprop->step()},
            {"square_avg", &rmsprop->square_avg()},
            {"momentum_buffer", &rmsprop->momentum_buffer()},
            {"grad_avg", &rmsprop->grad_avg()}};
  }
  if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state)) {
    return {{"step", &adagrad->step()}, {"sum", &adagrad->sum()}};
  }
  return {};
}

std::unique_ptr<torch::optim::OptimizerParamState> new_state(const Optimizer& optimizer,
                                                             Within within) {
  using namespace torch::optim;
  if (dynamic_cast<const Adam*>(&optimizer)) return std::make_unique<AdamParamState>();
  if (dynamic_cast<const AdamW*>(&optimizer)) return std::make_unique<AdamWParamState>();
  if (dynamic_cast<const SGD*>(&optimizer)) return std::make_unique<SGDParamState>();
  if (dynamic_cast<const RMSprop*>(&optimizer)) return std::make_unique<RMSpropParamState>();
  if (dynamic_cast<const Adagrad*>(&optimizer)) return std::make_unique<AdagradParamState>();
  throw ConfigError(fmt::format(
      "[checkpoint] an optimizer of class {} cannot be tracked: torch's Adam, AdamW, SGD, RMSprop "
      "and Adagrad can, and what is derived from them, and a ZeroOptimizer. {}",
      c10::demangle(typeid(optimizer).name()), advice(within)));
}

void refuse_unknown(const Optimizer& optimizer, Within within) {
  const auto known = new_state(optimizer, within);
  const auto refuse = [&](const std::type_info& kind) {
    throw ConfigError(fmt::format(
        "[checkpoint] an optimizer of class {} cannot be tracked as the one of libtorch that it is "
        "derived from: it keeps {}, which would be lost. {}",
        c10::demangle(typeid(optimizer).name()), c10::demangle(kind.name()), advice(within)));
  };
  for (const auto& [parameter, state] : optimizer.state()) {
    if (state == nullptr) continue;
    const auto& own = *state;
    if (typeid(own) != typeid(*known)) refuse(typeid(own));
  }
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = group.options();
    const auto is_a = [&]<class... Kinds>() { return (... || (typeid(options) == typeid(Kinds))); };
    using namespace torch::optim;
    if (!is_a.operator()<AdamOptions, AdamWOptions, SGDOptions, RMSpropOptions, AdagradOptions>()) {
      refuse(typeid(options));
    }
  }
}

namespace {
std::atomic<TrackOptimizer> track_other = nullptr;
}  // namespace

void track_optimizers_by(TrackOptimizer track) { track_other = track; }

std::shared_ptr<Stateful> tracked_by_its_class(Optimizer& optimizer) {
  const TrackOptimizer track = track_other;
  return track == nullptr ? nullptr : track(optimizer);
}

bool needs_first_state(const Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::Adagrad*>(&optimizer) != nullptr;
}

std::string name_in(const Saved& saved, const std::vector<std::string>& names,
                    const std::vector<StateField>& fields, const std::string& unnamed) {
  const auto found = std::ranges::find_if(names, [&](const std::string& name) {
    return std::ranges::any_of(fields, [&](const StateField& field) {
      return saved.tensors.contains(field.name + "/" + name);
    });
  });
  if (found != names.end()) return *found;
  return names.empty() ? unnamed : names.front();
}

void NextStates::give_to(torch::optim::Optimizer& optimizer) {
  for (const auto& [place, count] : counts) *place = count.item<int64_t>();
  auto before = std::move(optimizer.state());
  optimizer.state().clear();
  for (auto& [parameter, state] : states) {
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  for (auto* parameter : stay) {
    if (const auto found = before.find(parameter); found != before.end()) {
      optimizer.state()[parameter] = std::move(found->second);
    }
  }
  *this = {};
}

Values option_values(const Optimizer& optimizer) {
  Values values;
  size_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    auto options = group.options().clone();
    for (const auto& [name, value] : options_of(*options)) {
      const std::string path = fmt::format("group/{}/{}", number, name);
      if (const auto* real = std::get_if<double*>(&value)) values[path] = **real;
      if (const auto* flag = std::get_if<bool*>(&value)) values[path] = **flag;
      if (const auto* betas = std::get_if<Betas*>(&value)) {
        values[path] = std::vector<double>{std::get<0>(**betas), std::get<1>(**betas)};
      }
    }
    ++number;
  }
  return values;
}

std::vector<double> option_numbers(const Optimizer& optimizer) {
  std::vector<double> numbers;
  for (const auto& group : optimizer.param_groups()) {
    // Nothing is changed by way of these references.
    auto& options = const_cast<torch::optim::OptimizerOptions&>(group.options());
    for (const auto& [name, value] : options_of(options)) {
      if (const auto* real = std::get_if<double*>(&value)) numbers.push_back(**real);
      if (const auto* flag = std::get_if<bool*>(&value)) numbers.push_back(**flag ? 1 : 0);
      if (const auto* betas = std::get_if<Betas*>(&value)) {
        numbers.insert(numbers.end(), {std::get<0>(**betas), std::get<1>(**betas)});
      }
    }
  }
  return numbers;
}

void set_options(Optimizer& optimizer, const Values& values) {
  size_t number = 0;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& [name, value] : options_of(group.options())) {
      const std::string path = fmt::format("group/{}/{}", number, name);
      if (const auto* real = std::get_if<double*>(&value)) {
        **real = value_of<double>(values, path);
      } else if (const auto* flag = std::get_if<bool*>(&value)) {
        **flag = value_of<bool>(values, path);
      } else if (const auto pair = value_of<std::vector<double>>(values, path); pair.size() == 2) {
        *std::get<Betas*>(value) = {pair[0], pair[1]};
      }
    }
    ++number;
  }
}

}  // namespace lockstep::checkpoint

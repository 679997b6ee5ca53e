// What is in an optimizer, by name.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/state.h"

namespace lockstep::checkpoint {

// A parameter's tensor (undefined where there is none yet), of the parameter's sizes and dtype, or
// its count of steps.
struct StateField {
  std::string name;
  std::variant<at::Tensor*, int64_t*> value;
};

// Refers into `state`. Of a class that is not known: nothing.
std::vector<StateField> fields_of(torch::optim::OptimizerParamState& state);

// What an optimizer is tracked as, for the advice in an error about it.
enum class Within { Nothing, Zero };

// An empty state of the class that the optimizer uses. Throws ConfigError for an optimizer that is
// not known.
std::unique_ptr<torch::optim::OptimizerParamState> new_state(
    const torch::optim::Optimizer& optimizer, Within within = Within::Nothing);

// Throws ConfigError for an optimizer that is not known, and for one that is derived from such and
// keeps options or states of another class: they would be lost.
void refuse_unknown(const torch::optim::Optimizer& optimizer, Within within = Within::Nothing);

// How an optimizer of Lockstep's own class, such as ZeroOptimizer, is tracked when it is given as a
// torch::optim::Optimizer&: nullptr for one of another class. The constructor of such a class
// registers it, any number of times.
using TrackOptimizer = std::shared_ptr<Stateful> (*)(torch::optim::Optimizer&);
void track_optimizers_by(TrackOptimizer track);
std::shared_ptr<Stateful> tracked_by_its_class(torch::optim::Optimizer& optimizer);

// Whether steps take a state for granted that only the constructor makes: libtorch's Adagrad.
bool needs_first_state(const torch::optim::Optimizer& optimizer);

// The name under which a checkpoint has a parameter's state: of all the names that the parameter
// has, the first one with a field there; otherwise its first, or `unnamed` where it has none.
std::string name_in(const Saved& saved, const std::vector<std::string>& names,
                    const std::vector<StateField>& fields, const std::string& unnamed);

// What a checkpoint is read into, between a Stateful's destination() and restored().
struct NextStates {
  std::vector<std::pair<at::Tensor, std::unique_ptr<torch::optim::OptimizerParamState>>> states;
  std::vector<std::pair<int64_t*, at::Tensor>> counts;
  std::vector<at::TensorImpl*> stay;  // parameters that keep the state they have

  // In the place of all the states that it has; then there are none left here.
  void give_to(torch::optim::Optimizer& optimizer);
};

// Options of all groups: "group/0/lr".
Values option_values(const torch::optim::Optimizer& optimizer);
// The same values without their names, in one order.
std::vector<double> option_numbers(const torch::optim::Optimizer& optimizer);
void set_options(torch::optim::Optimizer& optimizer, const Values& values);

}  // namespace lockstep::checkpoint

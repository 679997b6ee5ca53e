// Which parameters are gathered together.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/fsdp.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {

struct PlannedUnit {
  std::string name;                           // of the module within the model; "" for the model
  const torch::nn::Module* module = nullptr;  // none for a scripted model
  std::shared_ptr<torch::nn::Module> owner;   // where a shared_ptr has it
  std::vector<size_t> parameters;             // of Model::parameters, in their order
};

// The units in the order of the modules, the model itself first. Communicates nothing; throws
// ConfigError.
std::vector<PlannedUnit> plan_units(const ModuleRef& ref, const Model& model,
                                    const FsdpOptions& options);

}  // namespace lockstep::parallel

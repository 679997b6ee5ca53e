// What the library has for the names of a configuration.
#pragma once

#include <map>
#include <string>

#include "lockstep/train/registry.h"

namespace lockstep::train {

std::map<std::string, Registry::MakeModel> builtin_models();
std::map<std::string, Registry::MakeData> builtin_data();  // datasets.cpp
std::map<std::string, Registry::ChooseOptimizer> builtin_optimizers();
std::map<std::string, Registry::MakeLoss> builtin_losses();

}  // namespace lockstep::train

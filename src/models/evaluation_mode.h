#pragma once

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep::models {

// Modules in evaluation mode while it lives; afterwards each is as it was, frozen layers too.
class EvaluationMode {
 public:
  EvaluationMode() = default;
  explicit EvaluationMode(torch::nn::Module& net) { add(net); }
  ~EvaluationMode() {
    for (const auto& [net, was_training] : roots_) put_back(*net, was_training);
    // A module that several others have comes after the first of them, and may come before another,
    // which then takes it along. With each round one more level of modules stays as it was.
    bool changes = true;
    for (size_t round = 0; changes && round <= below_.size(); ++round) {
      changes = false;
      for (const auto& [module, was_training] : below_) changes |= put_back(*module, was_training);
    }
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

  // Nets may have modules in common.
  void add(torch::nn::Module& net) {
    roots_.emplace_back(&net, was_training(net));
    for (const auto& module : net.modules(/*include_self=*/false)) {
      below_.emplace_back(module, was_training(*module));
    }
    net.eval();
  }

 private:
  // Before any net was added.
  bool was_training(const torch::nn::Module& module) {
    return known_.try_emplace(&module, module.is_training()).first->second;
  }
  // Whether that changed anything. train() goes down to the children.
  static bool put_back(torch::nn::Module& module, bool was_training) {
    if (module.is_training() == was_training) return false;
    module.train(was_training);
    return true;
  }

  std::map<const torch::nn::Module*, bool> known_;
  std::vector<std::pair<torch::nn::Module*, bool>> roots_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> below_;
};

}  // namespace lockstep::models

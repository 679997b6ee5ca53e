#pragma once

#include <torch/nn/module.h>

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
    for (const auto& [module, was_training] : below_) put_back(*module, was_training);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

  void add(torch::nn::Module& net) {
    roots_.emplace_back(&net, net.is_training());
    for (const auto& module : net.modules(/*include_self=*/false)) {
      below_.emplace_back(module, module->is_training());
    }
    net.eval();
  }

 private:
  // train() goes down to the children, which come after their parents.
  static void put_back(torch::nn::Module& module, bool was_training) {
    if (module.is_training() != was_training) module.train(was_training);
  }

  std::vector<std::pair<torch::nn::Module*, bool>> roots_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> below_;
};

}  // namespace lockstep::models

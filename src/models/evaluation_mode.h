#pragma once

#include <torch/nn/module.h>

namespace lockstep::models {

// Puts a module into evaluation mode while it lives.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& net) : net_(net), was_training_(net.is_training()) {
    if (was_training_) net_.eval();
  }
  ~EvaluationMode() {
    if (was_training_) net_.train();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& net_;
  bool was_training_;
};

}  // namespace lockstep::models

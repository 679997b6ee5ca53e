// What has to be the same when ActivationCheckpointing runs a forward() again.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/call_values.h"

namespace lockstep::parallel {

int64_t version_of(const at::Tensor& tensor);

// ConfigError where the first run changed one of its arguments in place: the second would begin
// with what that left.
void refuse_changes(const detail::Tensors& inputs, const std::vector<int64_t>& versions,
                    const std::string& module);

// Where the first run replaced a buffer: what else has the new tensor, such as a member or a
// scripted module, could not be given the one before.
[[noreturn]] void refuse_replaced(const torch::nn::Module& module, const std::string& buffer);

// The module's parameters as they were before the first run.
class ParametersBefore {
 public:
  explicit ParametersBefore(const torch::nn::Module& module);
  // ConfigError where one was changed in place since, as libtorch says it of what it has saved.
  void refuse_changes(const torch::nn::Module& module) const;

 private:
  std::vector<std::pair<at::Tensor, int64_t>> all_;
};

// What the first run returned: sizes and dtypes, and on a CPU, where to look is to wait for
// nothing, some of the elements.
class ResultsBefore {
 public:
  explicit ResultsBefore(const detail::Tensors& results);
  // ConfigError where the second run returned something else. Bits may differ, as they do for
  // another number of threads.
  void refuse_others(const detail::Tensors& results, const std::string& module) const;

 private:
  std::vector<at::Tensor> some_;  // undefined where they are not looked at
  std::vector<std::string> kinds_;
};

}  // namespace lockstep::parallel

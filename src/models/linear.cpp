#include "lockstep/models/linear.h"

#include <torch/torch.h>

#include <ostream>

#include "models/checks.h"

namespace lockstep::models {

LinearImpl::LinearImpl(const LinearOptions& options_) : options(options_) {
  check_positive("linear", "inputs", options.inputs);
  check_positive("linear", "outputs", options.outputs);
  LinearImpl::reset();
}

void LinearImpl::reset() {
  const torch::nn::LinearImpl drawn(
      torch::nn::LinearOptions(options.inputs, options.outputs).bias(options.bias));
  weight = register_parameter("weight", drawn.weight);
  bias = register_parameter("bias", drawn.bias, options.bias);
}

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  return torch::nn::functional::linear(flat_samples("linear", input, options.inputs), weight, bias);
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::models::Linear(inputs=" << options.inputs << ", outputs=" << options.outputs
         << ", bias=" << (options.bias ? "true" : "false") << ")";
}

}  // namespace lockstep::models

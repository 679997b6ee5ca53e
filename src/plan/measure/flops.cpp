#include "plan/measure/flops.h"

#include <ATen/core/ivalue.h>

#include <string_view>

namespace lockstep::plan {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;

thread_local double flops_so_far = 0;

double elements(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined()
             ? static_cast<double>(value.toTensor().numel())
             : 0;
}

double last_size(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().dim() > 0
             ? static_cast<double>(value.toTensor().size(-1))
             : 0;
}

// Inputs: data, weight, bias, stride, padding, dilation, transposed. Each weight is multiplied once
// for each sample and place of the output, or of the input when transposed.
double convolution_flops(Inputs inputs) {
  const auto data = inputs[0].toTensor().sizes(), weight = inputs[1].toTensor().sizes();
  const auto stride = inputs[3].toIntVector(), padding = inputs[4].toIntVector(),
             dilation = inputs[5].toIntVector();
  const bool transposed = inputs[6].toBool();
  double flops = 2 * static_cast<double>(data[0]) * elements(inputs[1]);
  for (size_t i = 0; i + 2 < weight.size(); ++i) {
    // One stride may stand for all dimensions.
    const auto of = [i](const std::vector<int64_t>& all) { return all[all.size() == 1 ? 0 : i]; };
    const int64_t reach = of(dilation) * (weight[i + 2] - 1) + 1;
    flops *= static_cast<double>(
        transposed ? data[i + 2] : (data[i + 2] + 2 * of(padding) - reach) / of(stride) + 1);
  }
  return flops;
}

// Inputs: query, key, value, dropout_p, is_causal. Queries by keys, then by values; of pairs in the
// future a causal kernel computes none.
double attention_flops(Inputs inputs) {
  const auto keys = static_cast<double>(inputs[1].toTensor().size(-2));
  const bool is_causal = inputs.size() > 4 && inputs[4].isBool() && inputs[4].toBool();
  return (is_causal ? 2 : 4) * elements(inputs[0]) * keys;
}

// Of the operators that do the arithmetic; those that call them are not counted again.
std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  const Inputs inputs = function.inputs();
  if (name == "aten::mm" || name == "aten::bmm") {
    flops_so_far += 2 * elements(inputs[0]) * last_size(inputs[1]);
  } else if (name == "aten::addmm" || name == "aten::baddbmm") {
    flops_so_far += 2 * elements(inputs[1]) * last_size(inputs[2]);
  } else if (name == "aten::convolution") {
    flops_so_far += convolution_flops(inputs);
  } else if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") {
    flops_so_far += attention_flops(inputs);
  }
  return nullptr;
}

}  // namespace

FlopCounter::FlopCounter()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&begin_operator)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {
  flops_so_far = 0;
}

FlopCounter::~FlopCounter() { at::removeCallback(handle_); }

double FlopCounter::count() const { return flops_so_far; }

}  // namespace lockstep::plan

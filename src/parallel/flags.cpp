#include "parallel/flags.h"

#include <torch/types.h>

namespace lockstep::parallel {

void Flags::write_all_reached() { elements_.narrow(0, 0, parameter_count()).fill_(reached()); }

void Flags::write(const std::vector<char>& is_reached) {
  std::vector<float> values(parameters_);
  for (size_t i = 0; i < parameters_; ++i) values[i] = is_reached[i] ? reached() : 1 - reached();
  elements_.narrow(0, 0, parameter_count()).copy_(torch::tensor(values));
}

void Flags::write_absent() { elements_.zero_(); }

void Flags::write_presence(int rank) {
  at::Tensor ranks = elements_.narrow(0, parameter_count(), elements_.numel() - parameter_count());
  ranks.zero_();
  ranks.narrow(0, rank, 1).fill_(1);
}

bool Flags::any_set() const { return elements_.narrow(0, 0, parameter_count()).any().item<bool>(); }

std::vector<double> Flags::read() const {
  const at::Tensor values = elements_.to(at::kCPU, at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

std::vector<char> Flags::set() const {
  const auto values = read();
  std::vector<char> set(parameters_);
  for (size_t i = 0; i < parameters_; ++i) set[i] = values[i] > 0;
  return set;
}

std::vector<int> Flags::present() const {
  const auto values = read();
  std::vector<int> ranks;
  for (size_t i = parameters_; i < values.size(); ++i) {
    if (values[i] > 0) ranks.push_back(static_cast<int>(i - parameters_));
  }
  return ranks;
}

}  // namespace lockstep::parallel

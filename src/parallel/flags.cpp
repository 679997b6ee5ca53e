#include "parallel/flags.h"

#include <torch/types.h>

namespace lockstep::parallel {
namespace {

std::vector<double> read(const at::Tensor& elements) {
  const at::Tensor values = elements.to(at::kCPU, at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

std::vector<char> set_ones(const at::Tensor& elements) {
  const auto values = read(elements);
  std::vector<char> set(values.size());
  for (size_t i = 0; i < set.size(); ++i) set[i] = values[i] > 0;
  return set;
}

}  // namespace

at::Tensor Flags::part(size_t begin, size_t count) const {
  return elements_.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(count));
}

void Flags::write_all_reached() { of_parameters().fill_(reached()); }

void Flags::write(const std::vector<char>& is_reached) {
  std::vector<float> values(counts_.parameters);
  for (size_t i = 0; i < values.size(); ++i) values[i] = is_reached[i] ? reached() : 1 - reached();
  of_parameters().copy_(torch::tensor(values));
}

void Flags::write_absent() { elements_.zero_(); }

void Flags::write_presence(int rank) {
  at::Tensor ranks = of_ranks();
  ranks.zero_();
  ranks.narrow(0, rank, 1).fill_(1);
}

void Flags::write_changed(const std::vector<char>& changed) {
  of_buffers().copy_(torch::tensor(std::vector<float>(changed.begin(), changed.end())));
}

bool Flags::any_set() const { return of_parameters().any().item<bool>(); }

std::vector<char> Flags::set() const { return set_ones(of_parameters()); }

std::vector<int> Flags::present() const {
  const auto ranks = set_ones(of_ranks());
  std::vector<int> present;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank]) present.push_back(static_cast<int>(rank));
  }
  return present;
}

std::vector<double> Flags::changed() const { return read(of_buffers()); }

}  // namespace lockstep::parallel

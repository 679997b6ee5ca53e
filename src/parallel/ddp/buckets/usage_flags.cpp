#include "parallel/ddp/buckets/usage_flags.h"

#include <torch/types.h>

#include <algorithm>

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

at::Tensor UsageFlags::part(size_t begin, size_t count) const {
  return elements_.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(count));
}

void UsageFlags::write_all_reached() {
  of_parameters().fill_(1);
  of_lacking().zero_();
}

void UsageFlags::write(const std::vector<char>& reached, const std::vector<char>& lacking) {
  of_parameters().copy_(torch::tensor(std::vector<float>(reached.begin(), reached.end())));
  if (counts_.lacking == 0) return;
  of_lacking().copy_(torch::tensor(std::vector<float>(lacking.begin(), lacking.end())));
}

void UsageFlags::write_absent() { elements_.zero_(); }

void UsageFlags::write_presence(int rank, Presence presence) {
  for (size_t block = 0; block < 2; ++block) {
    at::Tensor ranks = of_ranks(block);
    ranks.zero_();
    const bool is_set =
        presence == Presence::Backward || (presence == Presence::Held && block == 0);
    if (is_set) ranks.narrow(0, rank, 1).fill_(1);
  }
  of_prior().zero_();
}

void UsageFlags::write_changed(const std::vector<char>& changed) {
  of_buffers().copy_(torch::tensor(std::vector<float>(changed.begin(), changed.end())));
}

bool UsageFlags::any_lacking() const { return of_lacking().any().item<bool>(); }

std::vector<char> UsageFlags::set() const { return set_ones(of_parameters()); }
std::vector<char> UsageFlags::lacking() const { return set_ones(of_lacking()); }

std::vector<int> UsageFlags::ranks_in(size_t block) const {
  const auto ranks = set_ones(of_ranks(block));
  std::vector<int> set;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank]) set.push_back(static_cast<int>(rank));
  }
  return set;
}

std::vector<int> UsageFlags::present() const { return ranks_in(0); }
std::vector<int> UsageFlags::in_backward() const { return ranks_in(1); }

std::vector<double> UsageFlags::changed() const { return read(of_buffers()); }

void UsageFlags::write_prior() { of_prior().fill_(1); }
void UsageFlags::clear_prior() { of_prior().zero_(); }
bool UsageFlags::has_prior() const { return of_prior().any().item<bool>(); }

void UsageFlags::write_objection() { of_objection().fill_(1); }
void UsageFlags::clear_objection() { of_objection().zero_(); }

void UsageFlags::write_new_order() { of_new_order().fill_(1); }
void UsageFlags::clear_new_order() { of_new_order().zero_(); }
bool UsageFlags::has_new_order() const {
  return elements_.is_cpu() ? is_set(counts_.all() - 3) : of_new_order().any().item<bool>();
}

void UsageFlags::write_held() { of_held().fill_(1); }
void UsageFlags::clear_held() { of_held().zero_(); }
bool UsageFlags::has_held() const {
  return elements_.is_cpu() ? is_set(counts_.all() - 4) : of_held().any().item<bool>();
}

// A sum of zeros is zero in every bit, so this need not know the dtype. It runs in every pass.
bool UsageFlags::is_set(size_t place) const {
  if (!elements_.is_cpu()) return false;
  const size_t width = elements_.element_size();
  const char* element = static_cast<const char*>(elements_.const_data_ptr()) + place * width;
  return std::any_of(element, element + width, [](char byte) { return byte != 0; });
}

}  // namespace lockstep::parallel

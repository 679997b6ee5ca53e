#include "parallel/buffers.h"

#include <torch/types.h>

#include <algorithm>
#include <map>
#include <numeric>

namespace lockstep::parallel {
namespace {

bool is_averaged(const at::Tensor& tensor, Buffers mode) {
  return mode == Buffers::Average && tensor.is_floating_point();
}

std::vector<at::Tensor> broadcast_ones(std::vector<at::Tensor> buffers, Buffers mode) {
  std::erase_if(buffers, [&](const at::Tensor& tensor) { return is_averaged(tensor, mode); });
  return buffers;
}

}  // namespace

std::vector<int> all_ranks(const Group& group) {
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

BufferSync::BufferSync(const Group& group, const std::vector<at::Tensor>& buffers, Buffers mode)
    : group_(group), copied_(group, broadcast_ones(buffers, mode)) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const auto& buffer : buffers) {
    if (is_averaged(buffer, mode)) by_dtype[buffer.scalar_type()].push_back(buffer);
  }
  for (auto& [dtype, tensors] : by_dtype) {
    int64_t numel = 0;
    for (const auto& tensor : tensors) numel += tensor.numel();
    Flat flat{.flat = group.empty({numel}, tensors.front().options().requires_grad(false)),
              .tensors = std::move(tensors)};
    averaged_.push_back(std::move(flat));
  }
}

void BufferSync::start(const std::vector<int>& present) {
  const at::NoGradGuard no_grad;
  divisor_ = static_cast<int64_t>(present.size());
  const bool counts = std::ranges::find(present, group_.rank()) != present.end();
  copied_.start(present.front(), "buffers");
  for (auto& [flat, tensors, work] : averaged_) {
    int64_t offset = 0;
    for (const auto& tensor : tensors) {
      flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()).copy_(tensor);
      offset += tensor.numel();
    }
    if (!counts) flat.zero_();
    work = group_.all_reduce(flat, ReduceOp::Sum, {.tag = "buffers"});
  }
}

void BufferSync::finish() {
  copied_.finish();
  const at::NoGradGuard no_grad;
  for (auto& [flat, tensors, work] : averaged_) {
    work.wait();
    flat.div_(divisor_);
    int64_t offset = 0;
    for (const auto& tensor : tensors) {
      tensor.variable_data().copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }
}

}  // namespace lockstep::parallel

#include "parallel/ddp/packed.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "checkpoint/loads.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {

at::Tensor own_elements(const at::Tensor& tensor) {
  at::Tensor own = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) own = own.narrow(d, 0, 1);
  }
  return own;
}

bool has_overlaps(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride and size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return false;
    if (tensor.stride(d) != 0 && tensor.size(d) > 1) {
      dimensions.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::ranges::sort(dimensions);
  int64_t reach = 0;  // of the dimensions with smaller strides
  for (const auto& [stride, size] : dimensions) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

Packed::Packed(const Group& group, std::vector<at::Tensor> tensors)
    : group_(group), tensors_(std::move(tensors)) {
  if (tensors_.empty()) return;
  const at::NoGradGuard no_grad;
  FlatLayout layout(at::kByte, kCacheLine);
  for (const auto& tensor : tensors_) layout.add({}, own_elements(tensor).nbytes());
  flat_ = group.empty({layout.numel()},
                      tensors_.front().options().dtype(at::kByte).requires_grad(false));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    regions_.push_back(member_of(flat_, layout, i)
                           .view(tensors_[i].scalar_type())
                           .view(own_elements(tensors_[i]).sizes()));
  }
}

void Packed::start(int root, std::string_view label) {
  if (tensors_.empty()) return;
  const at::NoGradGuard no_grad;
  receives_ = group_.rank() != root;
  if (!receives_) {
    for (size_t i = 0; i < tensors_.size(); ++i) regions_[i].copy_(own_elements(tensors_[i]));
  }
  work_ = group_.broadcast(flat_, root, {.label = label});
}

void Packed::finish() {
  wait();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (receives_) {
      own_elements(tensors_[i]).copy_(regions_[i]);
    } else {
      torch::autograd::impl::bump_version(tensors_[i]);
    }
  }
}

void broadcast_all(const Group& group, const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                   int root, std::string_view label) {
  ++checkpoint::loads();
  std::vector<at::Tensor> chunk;
  int64_t bytes = 0;
  const auto send = [&] {
    Packed packed(group, std::move(chunk));
    packed.start(root, label);
    packed.finish();
    chunk.clear();
    bytes = 0;
  };
  for (const auto& tensor : tensors) {
    chunk.push_back(tensor);
    bytes += tensor.nbytes();
    if (bytes >= chunk_bytes) send();
  }
  if (!chunk.empty()) send();
}

}  // namespace lockstep::parallel

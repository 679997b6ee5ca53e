#include "parallel/packed.h"

#include <torch/csrc/autograd/variable.h>

namespace lockstep::parallel {

Packed::Packed(const Group& group, std::vector<at::Tensor> tensors)
    : group_(group), tensors_(std::move(tensors)) {
  if (tensors_.empty()) return;
  int64_t bytes = 0;
  for (const auto& tensor : tensors_) bytes += aligned(tensor.nbytes());
  flat_ = group.empty({bytes}, tensors_.front().options().dtype(at::kByte).requires_grad(false));
  int64_t offset = 0;
  for (const auto& tensor : tensors_) {
    const int64_t size = tensor.nbytes();
    regions_.push_back(
        flat_.narrow(0, offset, size).view(tensor.scalar_type()).view(tensor.sizes()));
    offset += aligned(size);
  }
}

void Packed::start(int root, std::string_view tag) {
  if (tensors_.empty()) return;
  const at::NoGradGuard no_grad;
  receives_ = group_.rank() != root;
  if (!receives_) {
    for (size_t i = 0; i < tensors_.size(); ++i) regions_[i].copy_(tensors_[i]);
  }
  work_ = group_.broadcast(flat_, root, {.tag = tag});
}

void Packed::finish() {
  work_.wait();
  if (!receives_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].variable_data().copy_(regions_[i]);
}

void broadcast_all(const Group& group, const std::vector<at::Tensor>& tensors, int64_t chunk_bytes,
                   int root, std::string_view tag) {
  std::vector<at::Tensor> chunk;
  int64_t bytes = 0;
  const auto send = [&] {
    Packed packed(group, std::move(chunk));
    packed.start(root, tag);
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

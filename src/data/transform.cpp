#include "lockstep/data/transform.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "data/loader/draws.h"
#include "data/stack.h"

namespace lockstep::data {
namespace {

// Views by sample, of which autograd, that is off here, notes nothing: that takes longer than the
// views.
std::vector<at::Tensor> samples_of(const at::Tensor& batch, size_t count) {
  if (!batch.defined()) return std::vector<at::Tensor>(count);
  const at::AutoDispatchBelowADInplaceOrView plain;
  if (batch.layout() == at::kStrided) return batch.unbind();
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < count; ++i) all.push_back(batch.select(0, static_cast<int64_t>(i)));
  return all;
}

}  // namespace

Batch Transform::apply(Batch batch, at::IntArrayRef indices, Draws& draws) const {
  if (!batch_) return apply_to_samples(std::move(batch), indices, draws);
  draws.for_batch(indices[0]);
  return batch_(std::move(batch));
}

Batch Transform::apply_to_samples(Batch batch, at::IntArrayRef indices, Draws& draws) const {
  std::vector<at::Tensor> data = samples_of(batch.data, indices.size());
  std::vector<at::Tensor> target = samples_of(batch.target, indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    draws.for_sample(indices[i]);
    Sample sample{std::move(data[i]), std::move(target[i])};
    sample = sample_ ? sample_(std::move(sample))
                     : drawing_(std::move(sample), draws.generator(at::kCPU));
    data[i] = std::move(sample.data);
    target[i] = std::move(sample.target);
  }
  return {stack_samples("data", data, indices), stack_samples("target", target, indices)};
}

}  // namespace lockstep::data

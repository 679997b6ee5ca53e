#include "lockstep/data/transform.h"

#include <torch/torch.h>

#include <utility>
#include <vector>

#include "data/loader/draws.h"
#include "data/stack.h"

namespace lockstep::data {

Batch Transform::apply(Batch batch, at::IntArrayRef indices, Draws& draws) const {
  if (!batch_) return apply_to_samples(std::move(batch), indices, draws);
  draws.for_batch(indices[0]);
  return batch_(std::move(batch));
}

Batch Transform::apply_to_samples(Batch batch, at::IntArrayRef indices, Draws& draws) const {
  std::vector<at::Tensor> data, target;
  for (int64_t i = 0; i < std::ssize(indices); ++i) {
    draws.for_sample(indices[i]);
    Sample sample{batch.data[i], batch.target.defined() ? batch.target[i] : at::Tensor()};
    sample = sample_ ? sample_(std::move(sample))
                     : drawing_(std::move(sample), draws.generator(at::kCPU));
    data.push_back(std::move(sample.data));
    target.push_back(std::move(sample.target));
  }
  return {stack_samples("data", data, indices), stack_samples("target", target, indices)};
}

}  // namespace lockstep::data

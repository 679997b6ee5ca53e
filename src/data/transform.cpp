#include "lockstep/data/transform.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "data/draws.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "));
}

// What the transforms of a batch's samples gave, for one of the two tensors.
class Stacked {
 public:
  Stacked(const char* what, at::IntArrayRef indices) : what_(what), indices_(indices) {}

  void add(at::Tensor tensor) {
    if (!tensors_.empty() && !is_like(tensors_.front(), tensor)) {
      throw DataError(fmt::format(
          "{} of sample {} is {}, that of sample {} {}: all of a batch need one shape and dtype",
          what_, indices_[0], shape_of(tensors_.front()), indices_[tensors_.size()],
          shape_of(tensor)));
    }
    tensors_.push_back(std::move(tensor));
  }

  at::Tensor tensor() const {
    return tensors_.front().defined() ? at::stack(tensors_) : at::Tensor();
  }

 private:
  static bool is_like(const at::Tensor& a, const at::Tensor& b) {
    if (a.defined() != b.defined()) return false;
    return !a.defined() || (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type());
  }

  const char* what_;
  at::IntArrayRef indices_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace

Batch Transform::apply(Batch batch, at::IntArrayRef indices, Draws& draws) const {
  if (!batch_) return apply_to_samples(std::move(batch), indices, draws);
  draws.for_batch(indices[0]);
  return batch_(std::move(batch));
}

Batch Transform::apply_to_samples(Batch batch, at::IntArrayRef indices, Draws& draws) const {
  Stacked data("data", indices), target("target", indices);
  for (int64_t i = 0; i < std::ssize(indices); ++i) {
    draws.for_sample(indices[i]);
    Sample sample{batch.data[i], batch.target.defined() ? batch.target[i] : at::Tensor()};
    sample = sample_ ? sample_(std::move(sample))
                     : drawing_(std::move(sample), draws.generator(at::kCPU));
    data.add(std::move(sample.data));
    target.add(std::move(sample.target));
  }
  return {data.tensor(), target.tensor()};
}

}  // namespace lockstep::data

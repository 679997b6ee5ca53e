#include "parallel/buckets.h"

#include <torch/types.h>

#include <algorithm>
#include <map>

#include "parallel/packed.h"

namespace lockstep::parallel {
namespace {

// The flat tensor's elements as the parameters' dtype.
at::Tensor typed(const at::Tensor& flat, at::ScalarType dtype) {
  return at::isComplexType(dtype) ? at::view_as_complex(flat.view({-1, 2})) : flat;
}

// A plain narrow().view() counts as a differentiable view, which Optimizer::zero_grad() refuses to
// detach in place.
at::Tensor alias(const at::Tensor& elements, const at::Tensor& parameter, int64_t offset) {
  const auto numel = parameter.numel();
  if (parameter.is_non_overlapping_and_dense()) {
    return elements
        .as_strided(parameter.sizes(), parameter.strides(), elements.storage_offset() + offset)
        .detach();
  }
  return elements.narrow(0, offset, numel).view(parameter.sizes()).detach();
}

}  // namespace

Assignment assign_buckets(const std::vector<Named>& parameters, const std::vector<size_t>& order,
                          const DdpOptions& limits) {
  struct Open {
    std::vector<size_t> members;
    int64_t bytes = 0;
    bool first = true;
    size_t last = 0;
  };
  std::map<at::ScalarType, Open> open;
  std::vector<std::pair<size_t, std::vector<size_t>>> closed;  // by the position of the last member
  const auto close = [&](Open& bucket) {
    closed.emplace_back(bucket.last, std::move(bucket.members));
    bucket = {.members = {}, .first = false};
  };
  for (size_t position = 0; position < order.size(); ++position) {
    const at::Tensor& tensor = parameters[order[position]].tensor;
    Open& bucket = open[tensor.scalar_type()];
    bucket.members.push_back(order[position]);
    bucket.bytes += tensor.nbytes();
    bucket.last = position;
    if (bucket.bytes >= (bucket.first ? limits.first_bucket_bytes : limits.bucket_bytes)) {
      close(bucket);
    }
  }
  for (auto& [dtype, bucket] : open) {
    if (!bucket.members.empty()) close(bucket);
  }
  std::sort(closed.begin(), closed.end());
  Assignment assignment;
  for (auto& [last, members] : closed) assignment.push_back(std::move(members));
  return assignment;
}

Buckets::Buckets(const Group& group, const std::vector<Named>& parameters, Assignment assignment)
    : assignment_(std::move(assignment)), bucket_of_(parameters.size()), views_(parameters.size()) {
  const at::NoGradGuard no_grad;
  for (size_t bucket = 0; bucket < assignment_.size(); ++bucket) {
    const auto& members = assignment_[bucket];
    const at::Tensor& like = parameters[members.front()].tensor;
    const at::ScalarType dtype = like.scalar_type(), real = c10::toRealValueType(dtype);
    const int64_t width = like.element_size(), per_element = at::isComplexType(dtype) ? 2 : 1;

    std::vector<int64_t> offsets;
    int64_t bytes = 0;
    for (size_t index : members) {
      offsets.push_back(bytes / width);
      bytes += aligned(parameters[index].tensor.nbytes());
    }
    const int64_t numel = bytes / width * per_element;
    const bool last = bucket + 1 == assignment_.size();
    const int64_t flags = last ? static_cast<int64_t>(parameters.size()) : 0;
    // An even count, so that the whole can be seen as pairs.
    flats_.push_back(group.empty({numel + (flags + 1) / 2 * 2},
                                 like.options().dtype(real).requires_grad(false)));
    if (last) flags_ = flats_.back().narrow(0, numel, flags);

    const at::Tensor elements = typed(flats_.back(), dtype);
    for (size_t i = 0; i < members.size(); ++i) {
      bucket_of_[members[i]] = bucket;
      views_[members[i]] = alias(elements, parameters[members[i]].tensor, offsets[i]);
    }
  }
}

bool Buckets::holds(const at::Tensor& gradient, size_t index) const {
  const at::Tensor& own = views_[index];
  return gradient.is_same(own) ||
         (gradient.layout() == at::kStrided && gradient.scalar_type() == own.scalar_type() &&
          gradient.const_data_ptr() == own.const_data_ptr() && gradient.sizes() == own.sizes() &&
          gradient.strides() == own.strides());
}

void Buckets::adopt(const at::Tensor& parameter, size_t index) const {
  at::Tensor& gradient = parameter.mutable_grad();
  const at::Tensor& own = views_[index];
  if (gradient.is_same(own)) return;
  const at::NoGradGuard no_grad;
  if (!holds(gradient, index)) {
    own.copy_(gradient.is_alias_of(own) ? gradient.clone() : gradient);
  }
  gradient = own;
}

}  // namespace lockstep::parallel

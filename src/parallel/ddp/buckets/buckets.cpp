#include "parallel/ddp/buckets/buckets.h"

#include <torch/types.h>

#include <algorithm>
#include <map>

#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {
namespace {

// A plain narrow().view() counts as a differentiable view, which Optimizer::zero_grad() refuses to
// detach in place.
at::Tensor alias(const at::Tensor& elements, const FlatLayout& layout, size_t member,
                 const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return elements
        .as_strided(parameter.sizes(), parameter.strides(),
                    elements.storage_offset() + layout.members()[member].begin)
        .detach();
  }
  return member_of(elements, layout, member).view(parameter.sizes()).detach();
}

}  // namespace

Assignment assign_buckets(const std::vector<Named>& parameters, const std::vector<size_t>& order,
                          const std::vector<int64_t>& limits) {
  struct Open {
    std::vector<size_t> members;
    int64_t bytes = 0;
    size_t before = 0;  // buckets of the dtype that are closed
    size_t last = 0;
  };
  std::map<at::ScalarType, Open> open;
  std::vector<std::pair<size_t, std::vector<size_t>>> closed;  // by the position of the last member
  const auto close = [&](Open& bucket) {
    closed.emplace_back(bucket.last, std::move(bucket.members));
    bucket = {.members = {}, .before = bucket.before + 1};
  };
  for (size_t position = 0; position < order.size(); ++position) {
    const at::Tensor& tensor = parameters[order[position]].tensor;
    Open& bucket = open[tensor.scalar_type()];
    bucket.members.push_back(order[position]);
    bucket.bytes += tensor.nbytes();
    bucket.last = position;
    if (bucket.bytes >= limits[std::min(bucket.before, limits.size() - 1)]) close(bucket);
  }
  for (auto& [dtype, bucket] : open) {
    if (!bucket.members.empty()) close(bucket);
  }
  std::sort(closed.begin(), closed.end());
  Assignment assignment;
  for (auto& [last, members] : closed) assignment.push_back(std::move(members));
  return assignment;
}

Buckets::Buckets(const Group& group, const std::vector<Named>& parameters, Assignment assignment,
                 size_t flags)
    : assignment_(std::move(assignment)), bucket_of_(parameters.size()), views_(parameters.size()) {
  const at::NoGradGuard no_grad;
  if (assignment_.empty()) assignment_.emplace_back();
  for (size_t index = 0; index < assignment_.size(); ++index) {
    const auto& members = assignment_[index];
    const at::TensorOptions options = members.empty()
                                          ? at::TensorOptions(at::kFloat)
                                          : parameters[members.front()].tensor.options();
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    FlatLayout layout(dtype, kCacheLine);
    for (size_t member : members) {
      layout.add(parameters[member].name, parameters[member].tensor.numel());
    }
    const int64_t numel = layout.reals();
    const bool last = index + 1 == assignment_.size();
    const int64_t extra = last ? static_cast<int64_t>(flags) : 0;
    // An even count, so that the whole can be seen as pairs.
    flats_.push_back(group.empty({numel + (extra + 1) / 2 * 2},
                                 options.dtype(c10::toRealValueType(dtype)).requires_grad(false)));
    if (last) flags_ = flats_.back().narrow(0, numel, extra);

    Bucket bucket{
        .index = index, .last = last, .flat = flats_.back().narrow(0, 0, numel), .names = {}};
    const at::Tensor elements = as_elements(flats_.back(), dtype);
    for (size_t i = 0; i < members.size(); ++i) {
      const Named& parameter = parameters[members[i]];
      bucket_of_[members[i]] = index;
      views_[members[i]] = alias(elements, layout, i, parameter.tensor);
      bucket.gradients.push_back(views_[members[i]].detach());
      bucket.parameters.push_back(parameter.tensor);
      bucket.names.push_back(parameter.name);
    }
    buckets_.push_back(std::move(bucket));
  }
}

bool Buckets::holds(const at::Tensor& gradient, size_t index) const {
  const at::Tensor& own = views_[index];
  return gradient.is_same(own) ||
         (gradient.layout() == at::kStrided && gradient.scalar_type() == own.scalar_type() &&
          gradient.const_data_ptr() == own.const_data_ptr() && gradient.sizes() == own.sizes() &&
          gradient.strides() == own.strides() && !gradient.is_conj() && !gradient.is_neg());
}

void Buckets::make_room(const std::vector<Named>& parameters,
                        const std::vector<at::Tensor>& others) {
  const at::NoGradGuard no_grad;
  const auto take_out = [&](const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || !gradient.has_storage()) return;
    const auto is_there = [&](const at::Tensor& flat) { return gradient.is_alias_of(flat); };
    if (std::ranges::any_of(flats_, is_there)) parameter.mutable_grad() = gradient.clone();
  };
  for (const at::Tensor& other : others) take_out(other);
  for (size_t i = 0; i < views_.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    if (parameter.grad().defined() && holds(parameter.grad(), i)) continue;
    take_out(parameter);
    make_room(i);
  }
}

void Buckets::make_room(size_t index) {
  if (views_[index].use_count() == 1) return;
  const at::Tensor kept = views_[index];
  views_[index] = kept.detach();
  kept.set_data(kept.clone());
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

#include "lockstep/parallel/ddp.h"

#include <fmt/format.h>

#include <optional>

#include "lockstep/core/error.h"
#include "parallel/accumulator.h"
#include "parallel/model.h"
#include "parallel/packed.h"
#include "parallel/reducer.h"

namespace lockstep::parallel {
namespace {

void check(const DdpOptions& options) {
  if (options.first_bucket_bytes < 1 || options.bucket_bytes < 1) {
    throw ConfigError(
        fmt::format("[ddp] first_bucket_bytes = {} and bucket_bytes = {}: both must be at least 1",
                    options.first_bucket_bytes, options.bucket_bytes));
  }
}

std::vector<at::Tensor> tensors_of(const std::vector<Named>& items) {
  std::vector<at::Tensor> tensors;
  for (const auto& item : items) tensors.push_back(item.tensor);
  return tensors;
}

}  // namespace

struct Ddp::State {
  Group group;
  std::vector<Named> parameters;  // trainable
  std::shared_ptr<int> holds = std::make_shared<int>(0);
  // Nothing of these in a group of one.
  std::optional<Packed> buffers;
  std::shared_ptr<Reducer> reducer;
  std::vector<Accumulator> accumulators;  // destroyed before the reducer they speak to

  void attach(const Model& model, const DdpOptions& options);
};

void Ddp::State::attach(const Model& model, const DdpOptions& options) {
  broadcast_all(group, model.tensors(), options.bucket_bytes, "Ddp: first state");
  buffers.emplace(group, tensors_of(model.buffers));
  reducer = std::make_shared<Reducer>(group, parameters, options, *buffers, holds);
  accumulators.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    accumulators.emplace_back(parameters[i].tensor, i, *reducer);
  }
}

Ddp::Ddp(torch::nn::Module& module, const Group& group, DdpOptions options)
    : state_(std::make_unique<State>()) {
  check(options);
  const Model model = Model::of(module);
  // The group's own memory is where the gradients will be.
  const at::Device device = group.empty({1}, at::kByte).device();
  verify(model, group, device);
  state_->group = group;
  state_->parameters = model.trainable();
  if (group.size() > 1) state_->attach(model, options);
}

Ddp::~Ddp() = default;
Ddp::Ddp(Ddp&&) noexcept = default;

void Ddp::zero_grad() {
  for (size_t i = 0; i < state_->accumulators.size(); ++i) {
    if (state_->accumulators[i].is_attached()) continue;
    throw ConfigError(fmt::format(
        "[ddp] parameter '{}' was converted to another dtype or device after Ddp was attached, so "
        "its gradient is no longer averaged: convert the module first, then construct Ddp",
        state_->parameters[i].name));
  }
  for (const auto& item : state_->parameters) item.tensor.mutable_grad().reset();
  if (state_->reducer) state_->reducer->forget();
}

Hold Ddp::hold() { return Hold(state_->holds); }

void Ddp::sync_buffers() {
  if (!state_->buffers) return;
  state_->buffers->start(0, "buffers");
  state_->buffers->finish();
}

std::vector<BucketInfo> Ddp::buckets() const {
  std::vector<BucketInfo> infos;
  if (!state_->reducer) return infos;
  for (const auto& members : state_->reducer->buckets().assignment()) {
    BucketInfo info{.dtype = state_->parameters[members.front()].tensor.scalar_type(), .names = {}};
    for (size_t i : members) {
      info.bytes += static_cast<int64_t>(state_->parameters[i].tensor.nbytes());
      info.names.push_back(state_->parameters[i].name);
    }
    infos.push_back(std::move(info));
  }
  return infos;
}

bool Ddp::rebuilt() const { return state_->reducer && state_->reducer->rebuilt(); }

}  // namespace lockstep::parallel

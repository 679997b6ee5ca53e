#include "lockstep/parallel/ddp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/accumulator.h"
#include "parallel/buffers.h"
#include "parallel/model.h"
#include "parallel/packed.h"
#include "parallel/reducer.h"

namespace lockstep::parallel {
namespace {

constexpr int64_t kMessageBytes = int64_t{25} << 20;

void check(const DdpOptions& options) {
  if (options.bucket_bytes.empty() || std::ranges::min(options.bucket_bytes) < 1) {
    throw ConfigError(
        fmt::format("[ddp] bucket_bytes = {{{}}}: there must be a number, and none below 1",
                    fmt::join(options.bucket_bytes, ", ")));
  }
  if (options.hook && options.reduce_dtype) {
    throw ConfigError(fmt::format(
        "[ddp] both the hook {} and reduce_dtype {} say how gradients are averaged: choose one",
        options.hook->name(), c10::toString(*options.reduce_dtype)));
  }
}

}  // namespace

struct Ddp::State {
  Group group;
  DdpOptions options;
  Model model;
  std::vector<Named> parameters;  // trainable: those with dense gradients, then the others
  std::shared_ptr<int> holds = std::make_shared<int>(0);
  // Nothing of these in a group of one.
  std::optional<BufferSync> buffers;
  std::shared_ptr<Reducer> reducer;
  std::vector<Accumulator> accumulators;  // destroyed before the reducer they speak to

  void attach();
  void attach_hook(const std::vector<Named>& dense);
};

// A state that was restored may fit on one rank only.
void Ddp::State::attach_hook(const std::vector<Named>& dense) {
  if (!options.hook) return;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& item : dense) by_name[item.name] = item.tensor;
  std::string fault;
  try {
    options.hook->attach(by_name);
  } catch (const ConfigError& error) {
    fault = fmt::format("{} (rank {})", error.what(), group.rank());
  }
  for (const auto& each : group.all_gather_bytes(fault, {.tag = "Ddp: hook"})) {
    if (!each.empty()) throw ConfigError(each);
  }
}

void Ddp::State::attach() {
  broadcast_all(group, model.tensors(), kMessageBytes, 0, "Ddp: first state");
  buffers.emplace(group, model.buffers, options.buffers);
  const auto first_sparse =
      std::ranges::stable_partition(parameters, [](const Named& item) { return !item.sparse; });
  attach_hook({parameters.begin(), first_sparse.begin()});
  reducer = std::make_shared<Reducer>(
      group, std::vector<Named>(parameters.begin(), first_sparse.begin()),
      std::vector<Named>(first_sparse.begin(), first_sparse.end()), options, *buffers, holds);
  accumulators.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    accumulators.emplace_back(parameters[i].tensor, i, *reducer);
  }
}

Ddp::Ddp(torch::nn::Module& module, const Group& group, DdpOptions options)
    : state_(std::make_unique<State>()) {
  check(options);
  state_->model = Model::of(module, {options.ignore, options.sparse});
  const auto& all = state_->model.parameters;
  const at::Device device = all.empty() ? at::kCPU : communicated_on(group, all.front().tensor);
  verify(state_->model, group, device);
  if (options.reduce_dtype) options.hook = std::make_shared<CastHook>(*options.reduce_dtype);
  state_->group = group;
  state_->options = std::move(options);
  state_->parameters = state_->model.trainable();
  if (group.size() > 1) state_->attach();
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
  if (state_->buffers) state_->buffers->sync();
}

std::vector<BucketInfo> Ddp::buckets() const {
  std::vector<BucketInfo> infos;
  if (!state_->reducer) return infos;
  for (const auto& members : state_->reducer->buckets().assignment()) {
    if (members.empty()) continue;  // of a module whose gradients are all sparse
    BucketInfo info{.dtype = state_->parameters[members.front()].tensor.scalar_type(), .names = {}};
    for (size_t i : members) {
      info.bytes += static_cast<int64_t>(state_->parameters[i].tensor.nbytes());
      info.names.push_back(state_->parameters[i].name);
    }
    infos.push_back(std::move(info));
  }
  return infos;
}

DdpLog Ddp::log() const {
  DdpLog log;
  log.backend = state_->group.backend();
  log.rank = state_->group.rank();
  log.world_size = state_->group.size();
  log.hook = state_->options.hook ? state_->options.hook->name() : "all_reduce";
  for (const auto& item : state_->parameters) {
    log.parameters += item.tensor.numel();
    log.parameter_bytes += static_cast<int64_t>(item.tensor.nbytes());
  }
  if (state_->reducer) state_->reducer->write(log);
  return log;
}

void Ddp::join(const JoinOptions& options) {
  if (state_->reducer) state_->reducer->join(options);
}

bool Ddp::shadow() { return state_->reducer && state_->reducer->shadow(); }

void Ddp::leave() {
  if (!state_->reducer) return;
  const auto present = state_->reducer->leave();
  if (static_cast<int>(present.size()) == state_->group.size()) return;
  broadcast_all(state_->group, state_->model.tensors(), kMessageBytes, present.front(),
                "Join: last state");
}

bool Ddp::rebuilt() const { return state_->reducer && state_->reducer->rebuilt(); }

}  // namespace lockstep::parallel

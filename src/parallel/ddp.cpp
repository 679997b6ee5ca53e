#include "lockstep/parallel/ddp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/parallel/hooks.h"
#include "parallel/accumulator.h"
#include "parallel/attached_module.h"
#include "parallel/buffers.h"
#include "parallel/join_gate.h"
#include "parallel/model.h"
#include "parallel/packed.h"
#include "parallel/rank_stream.h"
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
  if (options.check_same_every < 0) {
    throw ConfigError(fmt::format("[ddp] check_same_every = {}: a number of passes, or 0 for never",
                                  options.check_same_every));
  }
  if (options.hook && options.reduce_dtype) {
    throw ConfigError(fmt::format(
        "[ddp] both the hook {} and reduce_dtype {} say how gradients are averaged: choose one",
        options.hook->name(), c10::toString(*options.reduce_dtype)));
  }
}

// What keeps this rank alone from attaching to a module that all ranks have; empty when nothing
// does.
std::string shared_with_another(const Model& model) {
  for (const auto& item : model.parameters) {
    if (Accumulator::listener_of(item.tensor) == nullptr) continue;
    return fmt::format(
        "parameter '{}' belongs to another Ddp already, which would average its gradient too: "
        "destroy that one first, or name the parameter in DdpOptions::ignore",
        item.name);
  }
  return {};
}

void check(const Model& model, const Group& group, std::string complaint) {
  const auto& all = model.parameters;
  const at::Device device = all.empty() ? at::kCPU : communicated_on(group, all.front().tensor);
  verify(model, group, device, std::move(complaint));
}

}  // namespace

struct Ddp::State {
  Group group;
  DdpOptions options;
  std::shared_ptr<int> holds = std::make_shared<int>(0);
  std::optional<JoinOptions> joined;
  std::shared_ptr<JoinGate> gate;  // while joined, when layers communicate in forward()
  AttachedModule module;
  const torch::optim::Optimizer* optimizer = nullptr;  // that include_in_check() was given
  std::vector<Named> parameters;  // trainable: those with dense gradients, then the others
  // Nothing of these in a group of one.
  std::optional<BufferSync> buffers;
  std::shared_ptr<Reducer> reducer;
  std::vector<Accumulator> accumulators;  // destroyed before the reducer they speak to

  State(const ModuleRef& ref, const Group& g, DdpOptions o)
      : group(g), options(std::move(o)), module(ref, {options.ignore, options.sparse}) {}

  void attach();
  void attach_hook(const Model& model) const;
};

// A state that was restored may fit on one rank only.
void Ddp::State::attach_hook(const Model& model) const {
  if (!options.hook || group.size() == 1) return;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& item : model.trainable()) {
    if (!item.sparse) by_name[item.name] = item.tensor;
  }
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
  const Model& model = module.model();
  parameters = model.trainable();
  if (group.size() == 1) return;
  broadcast_all(group, model.tensors(), kMessageBytes, 0, "Ddp: first state");
  buffers.emplace(group, model.buffers, options.buffers);
  const auto first_sparse =
      std::ranges::stable_partition(parameters, [](const Named& item) { return !item.sparse; });
  reducer =
      std::make_shared<Reducer>(group, std::vector<Named>(parameters.begin(), first_sparse.begin()),
                                std::vector<Named>(first_sparse.begin(), first_sparse.end()),
                                options, module, *buffers, holds);
  reducer->include_in_check(optimizer);
  accumulators.reserve(model.parameters.size());
  for (const auto& item : parameters) {
    accumulators.emplace_back(item.tensor, accumulators.size(), *reducer);
  }
  for (const auto& item : model.parameters) {
    if (item.tensor.requires_grad()) continue;
    accumulators.emplace_back(item.tensor, accumulators.size(), *reducer);
  }
}

Ddp::Ddp(const ModuleRef& module, const Group& group, DdpOptions options) {
  group.refuse_python_ranks("Ddp");
  check(options);
  if (options.reduce_dtype) options.hook = std::make_shared<CastHook>(*options.reduce_dtype);
  state_ = std::make_unique<State>(module, group, std::move(options));
  check(state_->module.model(), group, shared_with_another(state_->module.model()));
  state_->attach_hook(state_->module.model());
  state_->attach();
  if (group.size() > 1) begin_rank_stream();
}

Ddp::~Ddp() = default;
Ddp::Ddp(Ddp&&) noexcept = default;

void Ddp::refresh() {
  AttachedModule now(state_->module.module(), state_->module.notes());
  check(now.model(), state_->group, {});
  state_->attach_hook(now.model());
  state_->accumulators.clear();
  state_->reducer.reset();
  state_->buffers.reset();
  state_->module = std::move(now);
  state_->attach();
  if (state_->joined) join(*state_->joined);
}

void Ddp::zero_grad() {
  state_->module.zero_grad();
  if (state_->reducer) state_->reducer->zeroed();
}

Hold Ddp::hold() { return Hold(state_->holds); }

void Ddp::sync_buffers() {
  if (state_->buffers) state_->buffers->sync();
}

void Ddp::include_in_check(const torch::optim::Optimizer& optimizer) {
  state_->optimizer = &optimizer;
  if (state_->reducer) state_->reducer->include_in_check(&optimizer);
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
  state_->joined = options;
  if (!state_->reducer) return;
  state_->gate = gate_of_layers(state_->module.module(), state_->group);
  state_->reducer->join(options, state_->gate);
}

bool Ddp::shadow() {
  if (!state_->reducer) return false;
  return state_->gate ? state_->gate->shadow() : state_->reducer->shadow();
}

void Ddp::leave() {
  state_->joined.reset();
  state_->gate.reset();
  if (!state_->reducer) return;
  const auto present = state_->reducer->leave();
  if (static_cast<int>(present.size()) == state_->group.size()) return;
  broadcast_all(state_->group, state_->module.model().tensors(), kMessageBytes, present.front(),
                "Join: last state");
}

bool Ddp::rebuilt() const { return state_->reducer && state_->reducer->rebuilt(); }

}  // namespace lockstep::parallel

#include "lockstep/parallel/ddp.h"

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "comm/text.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/deferred_init.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/metrics.h"
#include "parallel/ddp/attached_module.h"
#include "parallel/ddp/buffers/buffers.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/ddp/join/gate.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/packed.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/ddp/reducer/pass_queue.h"
#include "parallel/ddp/reducer/reducer.h"
#include "parallel/lanes/rules.h"
#include "parallel/layout/common_memory.h"
#include "parallel/step/rank_stream.h"

namespace lockstep::parallel {
namespace {

constexpr int64_t kMessageBytes = int64_t{25} << 20;

void check(const DdpOptions& options, const Group& group) {
  if (options.bucket_bytes.empty() || std::ranges::min(options.bucket_bytes) < 1) {
    throw ConfigError(
        fmt::format("[ddp] bucket_bytes = {{{}}}: there must be a number, and none below 1",
                    fmt::join(options.bucket_bytes, ", ")));
  }
  if (options.check_same_every < 0) {
    throw ConfigError(
        fmt::format("[ddp] check_same_every = {}: a number of passes, or 0 for the first only",
                    options.check_same_every));
  }
  check_lane_options(lane_options(options), group);
  if (options.hook && options.reduce_dtype) {
    throw ConfigError(fmt::format(
        "[ddp] both the hook {} and reduce_dtype {} say how gradients are averaged: choose one",
        options.hook->name(), comm::name_of(*options.reduce_dtype)));
  }
}

// What keeps this rank alone from attaching to a module that all ranks have; empty when nothing
// does. `own`: what refresh() is to replace.
std::string shared_with_another(const Model& model, const GradientListener* own) {
  for (const auto& item : model.parameters) {
    const GradientListener* listener = Accumulator::listener_of(item.tensor);
    if (listener == nullptr || listener == own) continue;
    return fmt::format(
        "parameter '{}' belongs to another Ddp already, which would average its gradient too: "
        "destroy that one first, or name the parameter in DdpOptions::ignore",
        item.name);
  }
  return {};
}

// What has to be the same on all ranks. How many lanes is compared by begin_lanes().
std::string describe(const DdpOptions& options) {
  return fmt::format("bucket_bytes {{{}}}, unused {}, buffers {}, hook {}, check_same_every {}, {}",
                     fmt::join(options.bucket_bytes, ", "),
                     options.unused == Unused::Zero ? "Zero" : "Error",
                     options.buffers == Buffers::Broadcast ? "Broadcast"
                     : options.buffers == Buffers::Average ? "Average"
                                                           : "None",
                     options.hook ? options.hook->name() : "none", options.check_same_every,
                     options.lanes > 0 ? "with lanes" : "without lanes");
}

void check(const Model& model, const Group& group, const DdpOptions& options,
           std::string complaint) {
  if (complaint.empty() && model.trainable().empty()) {
    complaint = fmt::format(
        "none of the module's {} parameters requires a gradient: there is nothing to average, so "
        "train without Ddp or unfreeze some{}",
        model.parameters.size(),
        model.parameters.empty() ? ". Layers that are plain members have to be registered by "
                                   "register_module(), so that the module has their parameters"
                                 : "");
  }
  if (complaint.empty() && (group.size() > 1 || options.lanes > 0)) {
    complaint = rewritten_by_forward(model);
  }
  const auto& all = model.parameters;
  const at::Device device = all.empty() ? at::kCPU : communicated_on(group, all.front().tensor);
  verify(model, group, device, std::move(complaint), "ddp", describe(options));
}

// In a group of one gradients go through nothing, but what a hook carries from other ranks has to
// follow the loss scale, so a GradScaler has to find it.
class OnlyRank : public GradientListener {
 public:
  explicit OnlyRank(std::shared_ptr<CommHook> hook) : hook_(std::move(hook)) {}
  at::Tensor arriving(size_t, const at::Tensor& gradient) override { return gradient; }
  void arrived(size_t) override {}
  std::shared_ptr<CommHook> hook() const override { return hook_; }

 private:
  std::shared_ptr<CommHook> hook_;
};

}  // namespace

struct Ddp::State {
  Group group;
  DdpOptions options;
  std::shared_ptr<int> holds = std::make_shared<int>(0);
  std::optional<JoinOptions> joined;
  JoinPlace place_in_join;
  std::shared_ptr<JoinGate> gate;  // while joined, when layers communicate in forward()
  AttachedModule module;
  const torch::optim::Optimizer* optimizer = nullptr;  // that include_in_check() was given
  std::vector<Named> parameters;  // trainable: those with dense gradients, then the others
  // Empty in a group of one.
  std::optional<BufferSync> buffers;
  std::shared_ptr<Reducer> reducer;
  std::shared_ptr<OnlyRank> only_rank;    // in a group of one, with a hook
  std::vector<Accumulator> accumulators;  // destroyed before what they call

  std::shared_ptr<const LanePlan> plan;  // with lanes

  State(const ModuleRef& ref, const Group& g, DdpOptions o)
      : group(g), options(std::move(o)), module(ref, {options.ignore, options.sparse}) {
    if (options.lanes > 0) plan = std::make_shared<LanePlan>(group, options.lanes);
  }
  // A group of one has no peers to average with, but may have lanes to add up.
  bool is_alone() const { return group.size() == 1 && !plan; }
  const GradientListener* listener() const {
    return reducer ? static_cast<const GradientListener*>(reducer.get()) : only_rank.get();
  }
  // With the buffers that the module has now.
  const Model& model();

  // Throws on all ranks unless all can attach to it. Then its parameters are this rank's own.
  void check(const AttachedModule& now) const;
  void attach();
  void attach_hook(const Model& model) const;
  // In the place that it has.
  void begin_join();
};

void Ddp::State::check(const AttachedModule& now) const {
  std::string complaint = shared_with_another(now.model(), listener());
  // What a hook carries is of the parameters that it was attached to last. A rank may have given it
  // to a Ddp of ranks that are not all in this group.
  if (const auto& hook = options.hook; complaint.empty() && hook && group.size() > 1 &&
                                       PassQueue::is_of_another(*hook, reducer.get())) {
    complaint = fmt::format(
        "the hook {} belongs to another Ddp, whose gradients it works on: make one for each",
        hook->name());
  }
  if (complaint.empty() && plan)
    complaint = unfit_for_lanes(now.model(), lane_options(options), now.module());
  parallel::check(now.model(), group, options, std::move(complaint));
  // All ranks are here, and none writes to what an Fsdp has left in common any more.
  if (group.size() > 1) take_own_copies(now.module().parameters());
}

// The hook's restored state may fit on some ranks only.
void Ddp::State::attach_hook(const Model& model) const {
  if (!options.hook) return;
  if (group.size() == 1 && PassQueue::is_of_another(*options.hook, reducer.get())) return;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& item : model.parameters) {
    if (!item.sparse) by_name[item.name] = item.tensor;
  }
  std::string fault;
  try {
    options.hook->attach(by_name);
  } catch (...) {
    fault = fmt::format("{} (rank {})", comm::thrown_text(), group.rank());
  }
  for (const auto& each : group.all_gather_bytes(fault, {.label = "Ddp: hook"})) {
    if (!each.empty()) throw ConfigError(each);
  }
}

void Ddp::State::begin_join() {
  if (!reducer) return;
  gate = gate_of_layers(module.module(), group);
  reducer->join(*joined, place_in_join, gate);
}

const Model& Ddp::State::model() {
  const auto& now = module.follow_buffers();
  if (buffers) buffers->follow(now);
  return module.model();
}

void Ddp::State::attach() {
  const Model& model = module.model();
  parameters = model.trainable();
  if (is_alone()) {
    if (!options.hook) return;
    if (!only_rank) only_rank = std::make_shared<OnlyRank>(options.hook);
    for (const auto& item : model.parameters) {
      accumulators.emplace_back(item.tensor, accumulators.size(), *only_rank);
    }
    return;
  }
  broadcast_all(group, model.tensors(), kMessageBytes, 0, "Ddp: first state");
  buffers.emplace(group, model.buffers, options.buffers);
  if (plan) buffers->use_lanes(plan);
  const auto first_sparse =
      std::ranges::stable_partition(parameters, [](const Named& item) { return !item.sparse; });
  reducer =
      std::make_shared<Reducer>(group, std::vector<Named>(parameters.begin(), first_sparse.begin()),
                                std::vector<Named>(first_sparse.begin(), first_sparse.end()),
                                options, module, *buffers, holds, plan);
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
  const c10::InferenceMode normal(false);  // what is made here is trained outside of it, too
  group.refuse_python_ranks("Ddp");
  check(options, group);
  materialize(module);
  if (options.reduce_dtype) options.hook = std::make_shared<CastHook>(*options.reduce_dtype);
  state_ = std::make_unique<State>(module, group, std::move(options));
  state_->check(state_->module);
  if (state_->plan) begin_lanes(group, lane_options(state_->options));
  state_->attach_hook(state_->module.model());
  state_->attach();
  // What is drawn outside of lanes is drawn with the same values on all ranks.
  if (group.size() > 1 && !state_->plan) begin_rank_stream();
}

Ddp::~Ddp() = default;
Ddp::Ddp(Ddp&&) noexcept = default;

void Ddp::refresh() {
  const c10::InferenceMode normal(false);  // what is made here is trained outside of it, too
  if (state_->module.module().has_expired())
    throw ConfigError("[ddp] refresh() of a module that was destroyed: keep it as long as the Ddp");
  materialize(state_->module.module());
  AttachedModule now(state_->module.module(), state_->module.notes());
  state_->check(now);
  state_->attach_hook(now.model());
  const auto held = state_->reducer ? state_->reducer->held() : std::vector<std::string>();
  state_->accumulators.clear();
  state_->reducer.reset();
  state_->buffers.reset();
  state_->module = std::move(now);
  state_->attach();
  if (state_->reducer) state_->reducer->keep_held(held);
  if (state_->joined) state_->begin_join();
}

void Ddp::zero_grad() {
  const bool had_others = state_->module.zero_grad();
  if (!state_->reducer) return;
  if (had_others) state_->reducer->refuse_unaveraged();
  state_->reducer->zeroed();
}

Hold Ddp::hold() {
  if (state_->reducer) state_->reducer->make_room();
  return Hold(state_->holds);
}

void Ddp::sync_buffers() {
  if (state_->plan && state_->options.buffers == Buffers::Average) {
    throw ConfigError(
        "[ddp] sync_buffers() would average buffers over ranks, which with lanes gives other bits "
        "on another number of them: change buffers in the same way on all ranks, or use "
        "Buffers::Broadcast");
  }
  state_->model();
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

// Whether any rank had a batch is asked in the first one's group.
void Ddp::begin_join(const Ddp& first) {
  const Group &all = first.state_->group, &own = state_->group;
  for (int rank = 0; own.size() > 1 && rank < own.size(); ++rank) {
    if (all.size() > 1 && own.rank_in(all, rank)) continue;
    throw ConfigError(
        fmt::format("[join] the first Ddp's group has {} ranks, and another one's a rank that is "
                    "not among them, which may have batches when these have none: name first a Ddp "
                    "whose group has all",
                    all.size()));
  }
  state_->place_in_join.is_first = this == &first;
}

void Ddp::join(const JoinOptions& options) {
  if (state_->plan) {
    throw ConfigError(
        "[join] a Ddp with lanes cannot be joined: every step has all lanes, so give all the same "
        "number of batches (Loader does)");
  }
  static std::atomic<int64_t> count = 0;
  state_->joined = options;
  state_->place_in_join.number = ++count;
  state_->begin_join();
}

bool Ddp::shadow() {
  if (!state_->reducer) return false;
  if (!state_->gate) return state_->reducer->shadow();
  state_->gate->shadow();
  average_held();
  return false;
}

void Ddp::average_held() {
  if (!state_->reducer || !any_rank(!state_->reducer->held().empty(), state_->group)) return;
  state_->reducer->shadow();
}

void Ddp::leave() {
  // The first one has done so when it found that no rank has a batch.
  if (!state_->place_in_join.is_first) average_held();
  state_->joined.reset();
  state_->place_in_join = {};
  state_->gate.reset();
  if (!state_->reducer) return;
  const auto present = state_->reducer->leave();
  if (static_cast<int>(present.size()) == state_->group.size()) return;
  Model model = state_->model();
  if (state_->options.buffers == Buffers::None &&
      std::ranges::find(present, state_->group.rank()) != present.end()) {
    for (auto& item : model.buffers) item.tensor = item.tensor.detach().clone();  // keeps its own
  }
  broadcast_all(state_->group, model.tensors(), kMessageBytes, present.front(), "Join: last state");
}

uint64_t Ddp::fingerprint() const { return parallel::fingerprint(state_->model().tensors()); }

int64_t Ddp::lane_count() const { return state_->plan ? state_->plan->lanes : 0; }

std::shared_ptr<const LanePlan> Ddp::plan() const {
  if (state_->plan) return state_->plan;
  throw ConfigError("[ddp] this Ddp has no lanes: set DdpOptions::lanes as the loader's");
}

void Ddp::check_lanes(int64_t of_step) const {
  if (plan()->lanes == of_step) return;
  throw ConfigError(
      fmt::format("[ddp] a step of {} lanes for a Ddp of {}: give LoaderOptions::lanes "
                  "and DdpOptions::lanes the same number",
                  of_step, plan()->lanes));
}

std::vector<std::shared_ptr<LaneListener>> Ddp::listeners_of(
    const std::vector<const Ddp*>& ddps) const {
  std::vector<std::shared_ptr<LaneListener>> listeners;
  for (const Ddp* ddp : ddps) {
    ddp->check_lanes(plan()->lanes);
    listeners.push_back(ddp->state_->reducer);
  }
  return listeners;
}

at::Device Ddp::device() const { return state_->parameters.front().tensor.device(); }

bool Ddp::rebuilt() const { return state_->reducer && state_->reducer->rebuilt(); }

}  // namespace lockstep::parallel

#include "parallel/fsdp/state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "checkpoint/file_memory.h"
#include "comm/transport.h"
#include "core/files/lasting_path.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/deferred_init.h"
#include "parallel/ddp/packed.h"
#include "parallel/lanes/rules.h"
#include "parallel/layout/overlap.h"

namespace lockstep::parallel {

// What is attached to a unit's module.
class Fsdp::State::Layer : public CallLayer {
 public:
  Layer(State& state, Unit& unit) : state_(state), unit_(unit) {}
  Tensors call(const Tensors& inputs, const Body& body) override {
    return state_.forward(unit_, inputs, body);
  }

 private:
  State& state_;
  Unit& unit_;
};

namespace {

LaneOptions lane_options(const FsdpOptions& options) {
  return {.who = "fsdp",
          .lanes = options.lanes,
          .threads = options.threads,
          .buffers = options.buffers};
}

constexpr int64_t kBroadcastBytes = int64_t{25} << 20;

void check_fsdp_options(const FsdpOptions& options, const Group& group) {
  if (options.shard_ranks < 0 ||
      (options.shard_ranks > 0 && group.size() % options.shard_ranks != 0)) {
    throw ConfigError(
        fmt::format("[fsdp] shard_ranks = {} for {} ranks: it must divide their number, or be 0 "
                    "for all of them",
                    options.shard_ranks, group.size()));
  }
  const int among = options.shard_ranks == 0 ? group.size() : options.shard_ranks;
  if (options.reshard_ranks < 0 ||
      (options.reshard_ranks > 0 && among % options.reshard_ranks != 0) ||
      (options.reshard_ranks > 0 &&
       (options.sharding != Sharding::Full || !options.reshard_after_forward))) {
    throw ConfigError(
        fmt::format("[fsdp] reshard_ranks = {} of {} ranks that share a model: it must divide "
                    "their number, and goes with Sharding::Full and reshard_after_forward only",
                    options.reshard_ranks, among));
  }
  if (options.sharding == Sharding::None && options.shard_ranks > 1) {
    throw ConfigError(
        fmt::format("[fsdp] Sharding::None and shard_ranks = {}: choose one", options.shard_ranks));
  }
  check_lane_options(lane_options(options), group);
  if (options.min_num_params < 0 || options.max_unsharded_units < 0) {
    throw ConfigError(fmt::format(
        "[fsdp] min_num_params = {} and max_unsharded_units = {}: neither may be below 0",
        options.min_num_params, options.max_unsharded_units));
  }
  for (const auto& [dtype, name] : {std::pair(options.param_dtype, "param_dtype"),
                                    std::pair(options.reduce_dtype, "reduce_dtype"),
                                    std::pair(options.buffer_dtype, "buffer_dtype")}) {
    if (!dtype || *dtype == at::kFloat || *dtype == at::kDouble || *dtype == at::kHalf ||
        *dtype == at::kBFloat16) {
      continue;
    }
    throw ConfigError(
        fmt::format("[fsdp] {} = {}: it must be float32, float64, float16 or bfloat16", name,
                    c10::toString(*dtype)));
  }
}

// What has to be the same on all ranks, and errors that this rank alone can find.
std::string describe_fsdp(const FsdpOptions& options, const std::vector<PlannedUnit>& units) {
  std::vector<std::string> names;
  for (const auto& unit : units) names.push_back(unit.name);
  const auto dtype = [](const std::optional<at::ScalarType>& value) {
    return value ? c10::toString(*value) : "none";
  };
  return fmt::format(
      "sharding {}, shard_ranks {}, reshard_after_forward {}, reshard_ranks {}, backward_prefetch "
      "{}, "
      "forward_prefetch {}, max_unsharded_units {}, share_memory {}, param_dtype {}, reduce_dtype "
      "{}, buffer_dtype {}, buffers {}, lanes {}, offload {}, units '{}'",
      static_cast<int>(options.sharding), options.shard_ranks, options.reshard_after_forward,
      options.reshard_ranks, static_cast<int>(options.backward_prefetch), options.forward_prefetch,
      options.max_unsharded_units, options.share_memory, dtype(options.param_dtype),
      dtype(options.reduce_dtype), dtype(options.buffer_dtype), static_cast<int>(options.buffers),
      options.lanes, static_cast<int>(options.offload), fmt::join(names, "', '"));
}

std::string unfit_for_fsdp(const Model& model) {
  for (const auto& item : model.parameters) {
    if (Accumulator::listener_of(item.tensor) != nullptr) {
      return fmt::format(
          "parameter '{}' belongs to a Ddp or another Fsdp already: destroy that one first, or "
          "name the parameter in FsdpOptions::ignore",
          item.name);
    }
    if (item.sparse) {
      return fmt::format(
          "parameter '{}' belongs to a layer with sparse gradients, which are not sharded: build "
          "it with sparse = false, or train with Ddp",
          item.name);
    }
    if (item.tensor.layout() == at::kStrided && !item.tensor.is_non_overlapping_and_dense()) {
      return fmt::format("parameter '{}' has gaps in its memory: clone() it, contiguously",
                         item.name);
    }
  }
  return {};
}

// Sharded parameters move to memory of their own, and others that had the same would stay.
std::string shared_memory(const Model& model, const ModuleRef& module) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  const auto add = [&](std::string_view kind, const std::string& name, const at::Tensor& tensor) {
    names.push_back(fmt::format("{} '{}'", kind, name));
    tensors.push_back(tensor);
  };
  for (const auto& item : model.parameters) add("parameter", item.name, item.tensor);
  for (const auto& [name, tensor] : module.parameters()) add("parameter", name, tensor);
  for (const auto& [name, tensor] : module.buffers()) add("buffer", name, tensor);
  const auto pair = first_overlap(tensors, model.parameters.size());
  if (!pair) return {};
  return fmt::format(
      "{} and {} are different tensors in the same memory, which division would take apart: to "
      "tie them, register one tensor under both names",
      names[pair->first], names[pair->second]);
}

// The text of the ConfigError that this rank alone may have reason for, and all ranks throw.
template <class Check>
std::string complaint_of(const Check& check) {
  try {
    check();
  } catch (const ConfigError& error) {
    const std::string_view text = error.what(), who = "[fsdp] ";
    return std::string(text.substr(text.starts_with(who) ? who.size() : 0));
  }
  return {};
}

}  // namespace

Fsdp::State::State(const ModuleRef& ref, const Group& group, FsdpOptions options)
    : plan_{.all = group, .options = std::move(options)},
      module_(ref, {plan_.options.ignore, {}, "FsdpOptions"}) {
  group.refuse_python_ranks("Fsdp");
  std::vector<PlannedUnit> planned;
  std::string complaint = complaint_of([&] {
    check_fsdp_options(plan_.options, group);
    plan_.options.offload_folder = lasting_path(plan_.options.offload_folder);
    if (plan_.options.sharding == Sharding::None) plan_.options.shard_ranks = 1;
    if (plan_.options.sharding != Sharding::Full) plan_.options.reshard_after_forward = false;
    if (plan_.options.offload == Offload::Cpu && device().is_cpu()) {
      plan_.options.offload = Offload::None;
    }
    planned = plan_units(ref, model(), plan_.options);
    if (plan_.options.lanes > 0) {
      lane_plan_ = std::make_shared<LanePlan>(group, plan_.options.lanes);
    }
    materialize_undivided();
  });
  check_model(group, planned, std::move(complaint));
  if (lane_plan_) begin_lanes(group, lane_options(plan_.options));
  plan_groups(group);
  make_units(planned);
}

Fsdp::State::~State() {
  attachments_.clear();
  accumulators_.clear();
  for (const size_t i : trainable_) model().parameters[i].tensor.mutable_grad() = at::Tensor();
  const bool stays = plan_.shares || whole_;
  for (const auto& unit : units_) {
    for (auto& flat : unit->flats) {
      if (!unit->shown) stays ? flat.show() : flat.abandon();
      // Of ranks that share a memory there is one copy, which stays for as long as the parameters
      // do.
      if (plan_.others_read()) flat.note_common();
    }
  }
}

void Fsdp::State::check_model(const Group& group, const std::vector<PlannedUnit>& planned,
                              std::string complaint) const {
  const auto& all = model().parameters;
  const at::Device on = all.empty() ? at::kCPU : communicated_on(group, all.front().tensor);
  if (complaint.empty()) complaint = unfit_for_fsdp(model());
  if (complaint.empty()) complaint = rewritten_by_forward(model());
  if (complaint.empty()) complaint = shared_memory(model(), module_.module());
  if (complaint.empty() && lane_plan_) {
    complaint = unfit_for_lanes(model(), lane_options(plan_.options), module_.module());
  }
  Fd room;  // until all ranks have theirs: they may have one disk
  if (complaint.empty()) complaint = missing_room(room);
  verify(model(), group, on, std::move(complaint), "fsdp");
  const std::string mine = describe_fsdp(plan_.options, planned);
  const auto texts = group.all_gather_bytes(mine, {.label = "Fsdp: comparing options"});
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    throw ConfigError(
        fmt::format("[fsdp] the ranks' options differ:\n  rank 0 has {}\n  rank {} "
                    "has {}",
                    texts[0], rank, texts[rank]));
  }
}

// Every rank keeps these whole.
void Fsdp::State::materialize_undivided() const {
  const auto& divided = model().parameters;
  for (const auto& [name, tensor] : module_.module().parameters()) {
    const auto is_this = [&](const Named& item) { return item.tensor.is_same(tensor); };
    if (std::ranges::none_of(divided, is_this)) materialize(tensor);
  }
  for (const auto& [name, tensor] : module_.module().buffers()) materialize(tensor);
}

at::Device Fsdp::State::device() const {
  const auto& all = model().parameters;
  return all.empty() ? at::Device(at::kCPU) : all.front().tensor.device();
}

// For the shards and their gradients, so that all ranks learn of an error before any shard is made.
std::string Fsdp::State::missing_room(Fd& held) const {
  const bool in_files = plan_.options.offload == Offload::File;
  const std::string& folder = plan_.options.offload_folder;  // a rank's own
  if (in_files == folder.empty()) {
    return fmt::format(
        "offload_folder '{}': it goes with Offload::File, and Offload::File needs one", folder);
  }
  if (!in_files) return {};
  const int among = plan_.options.shard_ranks == 0 ? plan_.all.size() : plan_.options.shard_ranks;
  int64_t bytes = 0;
  for (const auto& item : model().parameters) {
    const int copies = item.tensor.requires_grad() ? 2 : 1;
    bytes += copies * item.tensor.numel() * static_cast<int64_t>(item.tensor.element_size());
  }
  return checkpoint::missing_room(folder, bytes / among, held);
}

void Fsdp::State::plan_groups(const Group& group) {
  const int among = plan_.options.shard_ranks == 0 ? group.size() : plan_.options.shard_ranks;
  if (among == group.size()) {
    plan_.shards = group;
  } else {
    plan_.shards = group.split(group.rank() / among);
    plan_.replicas = group.split(group.rank() % among);
  }
  const bool on_cpu = device().is_cpu(), in_files = plan_.options.offload == Offload::File;
  if (plan_.shards.size() == 1) {
    plan_.shares = on_cpu || plan_.options.offload == Offload::None;
  } else {
    plan_.shares =
        plan_.options.share_memory && on_cpu && !in_files && plan_.shards.shared({1}).defined();
  }
  const int nearby = plan_.options.reshard_ranks;
  if (!plan_.shares && nearby > 0 && nearby < plan_.shards.size()) {
    plan_.resharded = plan_.shards.split(plan_.shards.rank() / nearby);
  }
}

void Fsdp::State::make_units(const std::vector<PlannedUnit>& planned) {
  const at::NoGradGuard no_grad;
  const auto& all = model().parameters;
  places_.resize(all.size());
  reached_.resize(all.size());
  arrived_.resize(all.size());
  guarded_.resize(all.size());
  caller_ = plan_.all.next_caller();
  std::vector<at::Tensor> buffers;
  for (const auto& item : model().buffers) buffers.push_back(item.tensor);
  broadcast_all(plan_.all, buffers, kBroadcastBytes, 0, "Fsdp: buffers");
  for (const auto& each : planned) {
    auto unit = std::make_unique<Unit>();
    unit->planned = each;
    unit->number = static_cast<uint32_t>(units_.size()) + 1;
    unit->is_root = each.name.empty();
    unit->name =
        unit->is_root ? "the root unit (the model itself)" : fmt::format("unit '{}'", each.name);
    std::map<std::pair<bool, at::ScalarType>, std::vector<size_t>> kinds;
    for (const size_t i : each.parameters) {
      kinds[{!all[i].tensor.requires_grad(), all[i].tensor.scalar_type()}].push_back(i);
    }
    unit->flats.reserve(kinds.size());
    for (auto& [kind, members] : kinds) {
      unit->flats.emplace_back(plan_, model(), std::move(members), unit->name);
      UnitFlat& flat = unit->flats.back();
      for (size_t i = 0; i < flat.members().size(); ++i) {
        places_[flat.members()[i]] = {unit.get(), &flat, i};
      }
    }
    units_.push_back(std::move(unit));
  }
  for (const auto& item : model().buffers) {
    if (plan_.options.buffer_dtype && item.tensor.is_floating_point()) {
      at::Tensor(item.tensor).set_data(item.tensor.to(*plan_.options.buffer_dtype));
    }
  }
}

void Fsdp::State::attach() {
  const auto& all = model().parameters;
  module_ = AttachedModule(module_.module(), module_.notes());  // as it is from now on
  buffers_.emplace(plan_.all, model().buffers, plan_.options.buffers);
  if (lane_plan_) buffers_->use_lanes(lane_plan_);
  int64_t largest = 0;
  std::vector<int64_t> blocks;
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) {
      if (!flat.is_trainable()) continue;
      if (unit->is_root) blocks.push_back(flat.gradient_bytes());
      if (!unit->is_root) largest = std::max(largest, flat.gradient_bytes());
    }
    if (unit->trainable() > 0) reduce_order_.insert(reduce_order_.begin(), unit.get());
  }
  // One unit computes its gradients while the averages of the one before it are on their way.
  if (largest > 0) blocks.insert(blocks.end(), 2, largest);
  memory_.emplace(plan_.shards, device(), blocks);
  for (const auto& unit : units_) {
    for (auto& flat : unit->flats) {
      if (lane_plan_ && flat.is_trainable()) flat.make_lane_slots(*lane_plan_);
    }
  }

  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].tensor.requires_grad()) trainable_.push_back(i);
    guards_.push_back(at::empty_like(all[i].tensor, at::TensorOptions().requires_grad(false)));
    guard_memory_.emplace_back(
        guards_.back(), all[i].tensor.scalar_type(),
        fmt::format("the gradient of parameter '{}' is sharded over the ranks: give optimizers, "
                    "clipping and the like fsdp.parameters() in the place of the module's",
                    all[i].name));
  }
  flag_counts_ = {.parameters = count_flags(),
                  .ranks = 0,
                  .buffers = plan_.options.buffers == Buffers::None ? 0 : buffers_->size()};
  flags_ = UsageFlags(plan_.all.empty({static_cast<int64_t>(flag_counts_.all())},
                                      at::TensorOptions(at::kFloat).device(device())),
                      flag_counts_);
  accumulators_.reserve(all.size());
  for (size_t i = 0; i < all.size(); ++i) accumulators_.emplace_back(all[i].tensor, i, *this);
  for (const auto& unit : units_) {
    layers_.push_back(std::make_unique<Layer>(*this, *unit));
    attachments_.emplace_back(*unit->planned.module, *layers_.back(), CallDepth::Shard);
  }
}

comm::CallOptions Fsdp::State::call(std::string_view label) const {
  return {.label = label,
          .context = {.name = "Fsdp", .number = caller_, .pass = pass_},
          .advice = "or a rank called other layers, or skipped a batch: see docs/fsdp.md"};
}

void Fsdp::State::end_all_groups(const std::string& why) const {
  if (plan_.shards.size() == plan_.all.size() && !plan_.resharded) return;  // there is one
  for (const Group* group : {&plan_.all, &plan_.shards, &plan_.replicas}) {
    if (group->size() > 1) group->transport().abort_all(why);
  }
}

void Fsdp::State::zero_grad() {
  if (is_in_lane()) {
    object_to_zero_grad(objection_, *lane_plan_);
    return;
  }
  if (lane_plan_) reset_lanes();
  for (const auto& unit : units_) {
    for (auto& flat : unit->flats) {
      flat.zero_grad();
      if (flat.is_trainable() && !backward_.is_open()) memory_->take_back(flat.drop_gradients());
    }
  }
  if (!backward_.is_open()) std::ranges::fill(reached_, false);
}

}  // namespace lockstep::parallel

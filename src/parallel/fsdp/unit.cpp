#include "parallel/fsdp/unit.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "checkpoint/file_memory.h"
#include "checkpoint/part_of.h"
#include "lockstep/core/error.h"
#include "parallel/ddp/gradients.h"
#include "parallel/layout/common_memory.h"
#include "parallel/layout/flat_memory.h"
#include "parallel/nn/deferred_init.h"

namespace lockstep::parallel {
namespace {

at::Tensor place_in_flat(const at::Tensor& flat, int64_t begin, const at::Tensor& parameter) {
  return flat.as_strided(parameter.sizes(), parameter.strides(), flat.storage_offset() + begin);
}

}  // namespace

GradientMemory::GradientMemory(const Group& group, at::Device device,
                               const std::vector<int64_t>& sizes) {
  for (const int64_t bytes : sizes) {
    blocks_.push_back({group.empty({bytes}, at::TensorOptions(at::kByte).device(device))});
  }
}

at::Tensor GradientMemory::lend(int64_t bytes) {
  Block* best = nullptr;
  for (auto& block : blocks_) {
    if (block.lent || block.memory.numel() < bytes) continue;
    if (best == nullptr || block.memory.numel() < best->memory.numel()) best = &block;
  }
  if (best == nullptr) return {};
  best->lent = true;
  return best->memory.narrow(0, 0, bytes);
}

void GradientMemory::take_back(const at::Tensor& memory) {
  if (!memory.defined()) return;
  for (auto& block : blocks_) {
    if (block.memory.is_alias_of(memory)) block.lent = false;
  }
}

at::Tensor ShardPlan::memory_of_shards(int64_t count, const at::TensorOptions& place) const {
  switch (options.offload) {
    case Offload::None:
      break;
    case Offload::Cpu:
      return at::empty({count}, place.device(at::kCPU).pinned_memory(place.device().is_cuda()));
    case Offload::File:
      return checkpoint::file_zeros(options.offload_folder, count, place.device(at::kCPU));
  }
  return at::empty({count}, place);
}

void HostCopies::note(at::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto place = std::ranges::find(events_, stream, [](const auto& item) { return item.first; });
  if (place == events_.end()) {
    place = events_.emplace(events_.end(), stream, c10::Event(device.type()));
  }
  place->second.record(stream);
}

void HostCopies::wait() {
  for (const auto& [stream, event] : events_) event.synchronize();
}

UnitFlat::UnitFlat(const ShardPlan& plan, const Model& model, std::vector<size_t> members,
                   std::string_view unit)
    : plan_(plan),
      members_(std::move(members)),
      layout_(model.parameters[members_.front()].tensor.scalar_type(), kCacheLine),
      trainable_(model.parameters[members_.front()].tensor.requires_grad()),
      unit_(unit),
      have_(members_.size()) {
  const at::NoGradGuard no_grad;
  const at::ScalarType own_dtype = layout_.dtype();
  const bool casts = at::isFloatingType(own_dtype);
  compute_ = casts ? plan.options.param_dtype.value_or(own_dtype) : own_dtype;
  reduce_ = casts ? plan.options.reduce_dtype.value_or(compute_) : own_dtype;
  for (const size_t i : members_) {
    parameters_.push_back(model.parameters[i].tensor);
    layout_.add(model.parameters[i].name, parameters_.back().numel());
  }
  cuts_ = layout_.cuts(plan.shards.size(), kCutGrid);
  if (plan.resharded) nearby_cuts_ = layout_.cuts(plan.resharded->size(), kCutGrid);
  own_ = {cuts_[plan.shards.rank()], cuts_[plan.shards.rank() + 1]};

  const auto options = parameters_.front().options().requires_grad(false);
  device_ = options.device();
  at::Tensor first = at::zeros({layout_.numel()}, options);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (plan.all.rank() > 0) break;
    place_in_flat(first, layout_.members()[i].begin, parameters_[i])
        .copy_(values_of(parameters_[i]));
  }
  plan.all.broadcast(as_reals(first), 0, {.label = unit}).wait();
  if (plan.shares) {
    const auto computed = options.dtype(compute_);
    shared_ = plan.shards.size() == 1 ? plan.memory_of_shards(layout_.numel(), computed)
                                      : plan.shards.shared({layout_.numel()}, computed);
    shared_.narrow(0, own_.begin, own_.size()).copy_(first.narrow(0, own_.begin, own_.size()));
  }
  if (plan.shares && compute_ == own_dtype) {
    shard_ = shared_.narrow(0, own_.begin, own_.size()).detach();
  } else {
    shard_ = plan.memory_of_shards(own_.size(), options);
    shard_.copy_(first.narrow(0, own_.begin, own_.size()));
  }
  ranges_.resize(members_.size());
  for (const auto& [member, range] : layout_.portions(own_)) ranges_[member] = range;
  for (size_t i = 0; i < members_.size(); ++i) {
    const std::string& name = layout_.members()[i].name;
    // Of a version of its own: an optimizer of some parameters writes to no others.
    leaves_.push_back(part_of(shard_, i).variable_data().requires_grad_(trainable_));
    checkpoint::mark_part(leaves_.back(), {.name = name,
                                           .sizes = parameters_[i].sizes().vec(),
                                           .strides = parameters_[i].strides().vec(),
                                           .range = ranges_[i],
                                           .saves = plan.replicas.rank() == 0,
                                           .is_first = plan.shards.rank() == 0,
                                           .ranks = plan.shards.size(),
                                           .world_ranks = plan.shards.world_ranks()});
    memory_.emplace_back(
        parameters_[i], compute_,
        fmt::format("parameter '{}' is sharded over the ranks and has no memory outside of its "
                    "unit: it belongs to {}, so call that by lockstep::call(), gather all "
                    "parameters by fsdp.unshard(), or give an optimizer fsdp.parameters(). A unit "
                    "whose weights are used by more than its forward() (a weight that is read, "
                    "forward_with_packed_input()): make the module around it the unit, by "
                    "FsdpOptions::units",
                    name, unit));
    parameters_[i].mutable_grad() = at::Tensor();
  }
  for (const auto& leaf : leaves_) counted_.push_back(leaf._version());
  published_ = counted_;
  for (const auto& parameter : parameters_) seen_.push_back(parameter._version());
}

void UnitFlat::abandon() {
  for (size_t i = 0; i < memory_.size(); ++i) {
    memory_[i].abandon(
        fmt::format("parameter '{}' was sharded over the ranks by an Fsdp that is gone, and with "
                    "it the other ranks' parts: call fsdp.unshard() before that one is destroyed",
                    layout_.members()[i].name));
  }
}

void UnitFlat::note_common() const { std::ranges::for_each(parameters_, &parallel::note_common); }

int64_t UnitFlat::gradient_bytes() const {
  return layout_.numel() * static_cast<int64_t>(c10::elementSize(reduce_));
}

std::vector<at::Tensor> UnitFlat::parts_of(const at::Tensor& flat,
                                           const std::vector<int64_t>& cuts) {
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
    parts.push_back(as_reals(flat.narrow(0, cuts[rank], cuts[rank + 1] - cuts[rank])));
  }
  return parts;
}

at::Tensor UnitFlat::part_of(const at::Tensor& own, size_t member) const {
  const Range& range = ranges_[member];
  if (range.size() == 0) return own.narrow(0, 0, 0);
  return own.narrow(0, layout_.members()[member].begin + range.begin - own_.begin, range.size());
}

void UnitFlat::publish() {
  nearby_ = at::Tensor();
  count_writes();
  published_ = counted_;
  share_values();
}

void UnitFlat::share_values() {
  if (!plan_.shares || compute_ == layout_.dtype()) return;
  const at::NoGradGuard no_grad;
  shared_.narrow(0, own_.begin, own_.size()).copy_(shard_);
}

void UnitFlat::count_writes() {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (std::exchange(counted_[i], leaves_[i]._version()) == leaves_[i]._version()) continue;
    torch::autograd::impl::bump_version(parameters_[i]);
    ++seen_[i];
  }
}

std::string UnitFlat::take_written() {
  std::string name;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t version = parameters_[i]._version();
    if (std::exchange(seen_[i], version) != version && name.empty()) {
      name = layout_.members()[i].name;
    }
  }
  return name;
}

bool UnitFlat::is_written() const {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (leaves_[i]._version() != published_[i]) return true;
  }
  return false;
}

void UnitFlat::check_leaves() const {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const char* why = nullptr;
    if (!leaves_[i].is_alias_of(shard_)) {
      why = "was given other memory, which the module does not see: copy_() values into it";
    } else if (leaves_[i].requires_grad() != trainable_) {
      why = trainable_ ? "was frozen: freeze the module's parameter itself"
                       : "was unfrozen: unfreeze the module's parameter, and construct Fsdp again";
    }
    if (why == nullptr) continue;
    throw ConfigError(
        fmt::format("[fsdp] the shard of parameter '{}' {}", layout_.members()[i].name, why));
  }
}

void UnitFlat::start_gather(const comm::CallOptions& options) {
  if (plan_.shares) return;
  const at::NoGradGuard no_grad;
  gathered_ = at::empty({layout_.numel()}, options_of(compute_));
  if (nearby_.defined()) {
    gather_ =
        plan_.resharded->all_gather(parts_of(gathered_, nearby_cuts_), as_reals(nearby_), options);
    return;
  }
  at::Tensor own = shard_;
  if (own.device() != device()) {
    own = own.to(device(), own.scalar_type(), /*non_blocking=*/true);
    copies_.note(device());
  }
  gather_ =
      plan_.shards.all_gather(parts_of(gathered_, cuts_), as_reals(own.to(compute_)), options);
}

void UnitFlat::show() {
  if (!plan_.shares) gather_.wait();
  const at::Tensor& flat = plan_.shares ? shared_ : gathered_;
  for (size_t i = 0; i < memory_.size(); ++i) {
    memory_[i].show(flat, layout_.members()[i].begin);
  }
}

void UnitFlat::keep_nearby() {
  if (!plan_.resharded || nearby_.defined()) return;
  const at::NoGradGuard no_grad;
  const int64_t begin = nearby_cuts_[plan_.resharded->rank()];
  nearby_ = gathered_.narrow(0, begin, nearby_cuts_[plan_.resharded->rank() + 1] - begin).clone();
}

void UnitFlat::hide() {
  using Memory = ParameterMemory::Memory;
  for (auto& memory : memory_) memory.hide(plan_.shares ? Memory::Kept : Memory::Freed);
  gathered_ = at::Tensor();
}

std::string UnitFlat::detached(const Model& model) const {
  for (size_t i = 0; i < memory_.size(); ++i) {
    if (!memory_[i].is_attached()) return model.parameters[members_[i]].name;
  }
  return {};
}

void UnitFlat::use(at::Tensor memory) { gradients_ = memory.view(reduce_); }

void UnitFlat::add_gradient(size_t member, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const at::Tensor& parameter = parameters_[member];
  const int64_t begin = layout_.members()[member].begin;
  const bool adds = std::exchange(have_[member], true);
  if (!adds && device().is_cpu()) {
    // Of small gradients a view takes longer than the copy.
    char* const memory = static_cast<char*>(gradients_.mutable_data_ptr());
    if (copy_bytes(memory + begin * gradients_.element_size(), reduce_, parameter, gradient))
      return;
  }
  const at::Tensor place = place_in_flat(gradients_, begin, parameter);
  adds ? place.add_(gradient) : place.copy_(gradient);
}

void UnitFlat::clear_absent() {
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& [name, numel, begin] = layout_.members()[i];
    if (!have_[i]) gradients_.narrow(0, begin, numel).zero_();
  }
}

void UnitFlat::prepare_average() {
  if (!average_.defined() || others_have_averages()) {
    average_ = plan_.memory_of_shards(own_.size(), options_of(layout_.dtype()));
    average_parts_.clear();
    for (size_t i = 0; i < members_.size(); ++i) {
      average_parts_.push_back(part_of(average_, i).variable_data());
    }
  }
  if (shard_.device() != device()) {
    received_ = at::empty({own_.size()}, options_of(reduce_));
  } else {
    received_ =
        averages_in_place() ? average_ : plan_.memory_of_shards(own_.size(), options_of(reduce_));
  }
  second_ = false;
}

bool UnitFlat::others_have_averages() const {
  if (average_.storage().use_count() > 1 + average_parts_.size()) return true;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const at::Tensor& part = average_parts_[i];
    // One that was a gradient may have been given other memory.
    if (part.use_count() > (leaves_[i].grad().is_same(part) ? 2U : 1U)) return true;
    if (part.requires_grad() || !part.is_alias_of(average_)) return true;
  }
  return false;
}

bool UnitFlat::averages_in_place() const {
  return reduce_ == layout_.dtype() && std::ranges::none_of(leaves_, [](const at::Tensor& leaf) {
           return leaf.grad().defined();
         });
}

void UnitFlat::bring_to_shard() {
  if (shard_.device() == device()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor here =
      averages_in_place() ? average_ : plan_.memory_of_shards(own_.size(), options_of(reduce_));
  here.copy_(received_, /*non_blocking=*/true);
  copies_.note(device());
  received_ = here;
}

void UnitFlat::start_reduce(const comm::CallOptions& options) {
  const at::NoGradGuard no_grad;
  clear_absent();
  prepare_average();
  label_ = options.label;
  reduce_work_ = plan_.shards.reduce_scatter(
      as_reals(received_), parts_of(gradients_, cuts_),
      plan_.replicas.size() > 1 ? ReduceOp::Sum : ReduceOp::Average, options);
}

void UnitFlat::make_lane_slots(const LanePlan& plan) {
  const auto options = at::TensorOptions(at::kByte).device(device());
  for (int slot = 0; slot < plan.slots; ++slot) {
    const at::Tensor bytes = slot == 0 ? plan.group.empty({gradient_bytes()}, options)
                                       : at::empty({gradient_bytes()}, options);
    lane_slots_.push_back(as_reals(bytes.view(reduce_)));
  }
}

void UnitFlat::place_lane(const LanePlan& plan, int64_t own_lane) {
  const at::NoGradGuard no_grad;
  clear_absent();
  plan.place(own_lane, as_reals(gradients_),
             [&](int slot) -> const at::Tensor& { return lane_slots_[slot]; });
}

void UnitFlat::start_lane_average(const LanePlan& plan, const comm::CallOptions& options) {
  const at::NoGradGuard no_grad;
  prepare_average();
  const auto nodes = static_cast<std::ptrdiff_t>(plan.sum.nodes().size());
  reduce_work_ = plan.sum.average({lane_slots_.begin(), lane_slots_.begin() + nodes}, options);
}

void UnitFlat::start_second_reduce() {
  second_ = true;
  reduce_work_ = plan_.replicas.all_reduce(as_reals(received_), ReduceOp::Sum, {.label = label_});
}

bool UnitFlat::advance_reduce() {
  if (!reduce_work_.is_completed()) return false;
  if (plan_.replicas.size() == 1 || !lane_slots_.empty() || second_) return true;
  reduce_work_.wait();
  start_second_reduce();
  return false;
}

at::Tensor UnitFlat::finish_reduce() {
  reduce_work_.wait();
  if (!lane_slots_.empty()) {
    const at::NoGradGuard no_grad;
    const int64_t reals = received_.is_complex() ? 2 : 1;  // an element
    const at::Tensor own =
        lane_slots_.front().view({-1}).narrow(0, own_.begin * reals, own_.size() * reals);
    const at::Tensor target = as_reals(received_);
    target.copy_(own.view(target.sizes()));
  } else if (plan_.replicas.size() > 1) {
    if (!second_) start_second_reduce();
    reduce_work_.wait();
    const at::NoGradGuard no_grad;
    as_reals(received_).div_(plan_.all.size());
  }
  bring_to_shard();
  return drop_gradients();
}

at::Tensor UnitFlat::drop_gradients() {
  std::ranges::fill(have_, false);
  return std::exchange(gradients_, {});
}

void UnitFlat::drop_gradient(size_t member) {
  have_[member] = false;
  leaves_[member].mutable_grad() = at::Tensor();
}

void UnitFlat::settle(const std::vector<char>& reached) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!reached[members_[i]]) continue;
    at::Tensor& gradient = leaves_[i].mutable_grad();
    if (gradient.defined()) {
      gradient.add_(part_of(received_, i));
      continue;
    }
    gradient = average_parts_[i];
    if (!received_.is_same(average_)) gradient.copy_(part_of(received_, i));
  }
  received_ = at::Tensor();
}

void UnitFlat::zero_grad() {
  for (auto& leaf : leaves_) leaf.mutable_grad() = at::Tensor();
}

size_t Unit::trainable() const {
  size_t count = 0;
  for (const auto& flat : flats) {
    if (flat.is_trainable()) count += flat.members().size();
  }
  return count;
}

}  // namespace lockstep::parallel

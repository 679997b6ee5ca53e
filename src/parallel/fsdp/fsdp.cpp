#include "lockstep/parallel/fsdp.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "lockstep/core/error.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/fsdp/state.h"
#include "parallel/lanes/plan.h"
#include "parallel/step/rank_stream.h"

namespace lockstep::parallel {

Fsdp::Fsdp(const ModuleRef& module, const Group& group, FsdpOptions options) {
  const c10::InferenceMode normal(false);  // what is made here is trained outside of it, too
  state_ = std::make_shared<State>(module, group, std::move(options));
  state_->attach();
  // What is drawn outside of lanes is drawn with the same values on all ranks.
  if (group.size() > 1 && !state_->lane_plan()) begin_rank_stream();
}

Fsdp::~Fsdp() = default;
Fsdp::Fsdp(Fsdp&&) noexcept = default;

std::vector<at::Tensor> Fsdp::parameters() const {
  std::vector<at::Tensor> leaves;
  for (const auto& shard : shards()) leaves.push_back(shard.shard);
  return leaves;
}

std::vector<FsdpShard> Fsdp::shards() const {
  std::vector<FsdpShard> all;
  const auto& parameters = state_->model().parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [unit, flat, member] = state_->place(i);
    all.push_back({.name = parameters[i].name,
                   .shard = flat->leaf(member),
                   .sizes = parameters[i].tensor.sizes().vec(),
                   .begin = flat->range(member).begin});
  }
  return all;
}

std::vector<FsdpUnit> Fsdp::units() const {
  std::vector<FsdpUnit> all;
  for (const auto& unit : state_->units()) {
    FsdpUnit info{.name = unit->planned.name, .parameters = {}};
    for (const auto& flat : unit->flats) {
      for (size_t i = 0; i < flat.members().size(); ++i) {
        info.parameters.push_back(flat.layout().members()[i].name);
        info.numel += flat.layout().members()[i].numel;
        info.own_numel += flat.range(i).size();
      }
    }
    all.push_back(std::move(info));
  }
  return all;
}

void Fsdp::zero_grad() { state_->zero_grad(); }
Hold Fsdp::hold() { return Hold(state_->holds()); }
void Fsdp::unshard() { state_->unshard(); }
void Fsdp::reshard() { state_->reshard(); }
void Fsdp::sync_buffers() {
  if (state_->lane_plan() && state_->plan().options.buffers == Buffers::Average) {
    throw ConfigError(
        "[fsdp] sync_buffers() would average buffers over ranks, which with lanes gives other bits "
        "on another number of them: change buffers in the same way on all ranks, or use "
        "Buffers::Broadcast");
  }
  state_->buffers().sync();
}
bool Fsdp::shares_memory() const { return state_->plan().shares; }
bool Fsdp::is_unsharded() const { return state_->is_whole(); }

int64_t Fsdp::lane_count() const { return state_->lane_plan() ? state_->lane_plan()->lanes : 0; }

uint64_t Fsdp::fingerprint() {
  const bool was_whole = state_->is_whole();
  state_->unshard();
  const uint64_t hash = parallel::fingerprint(state_->model().tensors());
  if (!was_whole) state_->reshard();
  return hash;
}

std::shared_ptr<const LanePlan> Fsdp::plan() const {
  if (state_->lane_plan()) return state_->lane_plan();
  throw ConfigError("[fsdp] this Fsdp has no lanes: set FsdpOptions::lanes as the loader's");
}

void Fsdp::check_lanes(int64_t of_step) const {
  if (plan()->lanes == of_step) return;
  throw ConfigError(
      fmt::format("[fsdp] a step of {} lanes for an Fsdp of {}: give LoaderOptions::lanes and "
                  "FsdpOptions::lanes the same number",
                  of_step, plan()->lanes));
}

std::vector<std::shared_ptr<LaneListener>> Fsdp::listeners_of(
    const std::vector<const Fsdp*>& all) const {
  std::vector<std::shared_ptr<LaneListener>> listeners;
  for (const Fsdp* fsdp : all) {
    fsdp->check_lanes(plan()->lanes);
    listeners.push_back(fsdp->state_);
  }
  return listeners;
}

at::Device Fsdp::device() const {
  const auto& all = state_->model().parameters;
  return all.empty() ? at::Device(at::kCPU) : all.front().tensor.device();
}

}  // namespace lockstep::parallel

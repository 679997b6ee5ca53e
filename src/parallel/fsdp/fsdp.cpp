#include "lockstep/parallel/fsdp.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "lockstep/core/error.h"
#include "parallel/fsdp/state.h"
#include "parallel/step/rank_stream.h"

namespace lockstep::parallel {

Fsdp::Fsdp(const ModuleRef& module, const Group& group, FsdpOptions options)
    : state_(std::make_shared<State>(module, group, std::move(options))) {
  state_->attach();
  if (group.size() > 1) begin_rank_stream();
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
void Fsdp::sync_buffers() { state_->buffers().sync(); }
bool Fsdp::shares_memory() const { return state_->plan().shares; }

}  // namespace lockstep::parallel

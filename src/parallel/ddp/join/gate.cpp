#include "parallel/ddp/join/gate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "parallel/nn/batch_norm_override.h"

namespace lockstep::parallel {
namespace {

[[noreturn]] void refuse(int with_batch, const Group& group) {
  throw DataError(fmt::format(
      "[join] {} of {} ranks have a batch for this step, the others have run out, and a model with "
      "SyncBatchNorm needs all: give all ranks as many (a sampler that pads or drops)",
      with_batch, group.size()));
}

template <size_t D>
bool give(torch::nn::Module& layer, const std::shared_ptr<JoinGate>& gate) {
  auto* norm = layer.as<SyncBatchNormImpl<D>>();
  if (norm == nullptr || norm->group().size() == 1) return false;
  norm->set_gate(gate);
  return true;
}

}  // namespace

int JoinGate::ranks_with_batch(int mine) const {
  const at::Tensor count = at::full({1}, mine, at::kInt);
  group_.all_reduce(count, ReduceOp::Sum, {.label = "Join: who has a batch"}).wait();
  return count.item<int>();
}

void JoinGate::begin_forward() {
  // Activation checkpointing repeats a forward that all had a batch for.
  const bool recomputes = torch::autograd::get_current_graph_task_id() != -1;
  if (has_begun_ || recomputes) return;
  const int with_batch = ranks_with_batch(1);
  if (with_batch < group_.size()) refuse(with_batch, group_);
  has_begun_ = true;
}

void JoinGate::shadow() const {
  const int with_batch = ranks_with_batch(0);
  if (with_batch > 0) refuse(with_batch, group_);
}

std::shared_ptr<JoinGate> gate_of_layers(const ModuleRef& module, const Group& group) {
  if (module.module() == nullptr || module.has_expired()) return nullptr;
  auto gate = std::make_shared<JoinGate>(group);
  bool is_needed = false;
  if (gate_batch_norm(*module.module(), gate)) is_needed = true;
  for (const auto& layer : module.module()->modules(/*include_self=*/false)) {
    if (give<1>(*layer, gate) || give<2>(*layer, gate) || give<3>(*layer, gate) ||
        gate_batch_norm(*layer, gate)) {
      is_needed = true;
    }
  }
  return is_needed ? gate : nullptr;
}

}  // namespace lockstep::parallel

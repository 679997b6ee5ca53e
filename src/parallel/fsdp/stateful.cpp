// What a checkpoint saves of an Fsdp.
#include "lockstep/parallel/stateful.h"

#include <fmt/format.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/part_of.h"
#include "lockstep/checkpoint/error.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/fsdp/parameter_memory.h"
#include "parallel/fsdp/state.h"

namespace lockstep::parallel {

class FsdpState : public Stateful {
 public:
  explicit FsdpState(Fsdp& fsdp) : state_(fsdp.state_) {}

  checkpoint::State state(const checkpoint::Names&) const override {
    const auto fsdp = held();
    return described(*fsdp, fsdp->plan().replicas.rank() == 0 ? Parts::Own : Parts::None);
  }

  checkpoint::State destination(const checkpoint::Saved&, const checkpoint::Names&) override {
    const auto fsdp = held();
    checkpoint::State state = described(*fsdp, Parts::Own);
    for (const auto& item : fsdp->model().parameters) {
      state.others.push_back(checkpoint::pattern_of(item.name));
    }
    return state;
  }

  void restored(const checkpoint::State&) override { held()->shards_changed(); }

  void add_names(const std::string& prefix, checkpoint::Names& names) const override {
    const auto fsdp = held(" as " + prefix);
    const auto& parameters = fsdp->model().parameters;
    std::map<const at::TensorImpl*, std::vector<std::string>> further;  // of tied ones
    for (const auto& [name, tensor] : fsdp->module().parameters()) {
      further[tensor.unsafeGetTensorImpl()].push_back(name);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [unit, flat, member] = fsdp->place(i);
      names.add(flat->leaf(member), prefix + "/" + parameters[i].name);
      names.add(parameters[i].tensor, prefix + "/" + parameters[i].name);
      for (const auto& name : further[parameters[i].tensor.unsafeGetTensorImpl()]) {
        names.add(flat->leaf(member), prefix + "/" + name);
        names.add(parameters[i].tensor, prefix + "/" + name);
      }
    }
    for (const auto& item : fsdp->model().buffers) {
      names.add(item.tensor, prefix + "/" + item.name);
    }
    for (const auto& [name, tensor] : ignored(*fsdp)) names.add(tensor, prefix + "/" + name);
  }

 private:
  // The checkpointer asks for the names first, so that the error has one.
  std::shared_ptr<Fsdp::State> held(std::string_view as = "") const {
    if (auto fsdp = state_.lock()) return fsdp;
    throw CheckpointError(fmt::format(
        "[checkpoint] the Fsdp that is tracked{} is not there any more: for the one in its place "
        "destroy this Checkpointer, which holds the directory, and make another",
        as));
  }

  enum class Parts { Own, None };

  static checkpoint::State described(const Fsdp::State& fsdp, Parts parts) {
    checkpoint::State state;
    const auto& parameters = fsdp.model().parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [unit, flat, member] = fsdp.place(i);
      const at::Tensor& leaf = flat->leaf(member);
      const auto* whole = checkpoint::part_of(leaf);
      const bool mine = parts == Parts::Own && (leaf.numel() > 0 || whole->is_of_nothing());
      if (mine) state.pieces.push_back(checkpoint::part_piece(parameters[i].name, *whole, leaf));
    }
    for (const auto& item : fsdp.model().buffers) {
      state.pieces.push_back(checkpoint::whole_piece(item.name, item.tensor));
    }
    for (const auto& [name, tensor] : ignored(fsdp)) {
      state.pieces.push_back(checkpoint::whole_piece(name, tensor));
    }
    std::map<const at::TensorImpl*, std::string> first;
    const auto note = [&](const ModuleRef::NamedTensors& tensors) {
      for (const auto& [name, tensor] : tensors) {
        const auto [place, fresh] = first.try_emplace(tensor.unsafeGetTensorImpl(), name);
        if (!fresh) state.aliases[name] = place->second;
      }
    };
    note(fsdp.module().parameters());
    note(fsdp.module().buffers());
    return state;
  }

  // What FsdpOptions::ignore names, which every rank has whole; without what another Fsdp shards,
  // and saves.
  static ModuleRef::NamedTensors ignored(const Fsdp::State& fsdp) {
    std::set<const at::TensorImpl*> seen;
    const auto& model = fsdp.model();
    for (const auto& item : model.parameters) seen.insert(item.tensor.unsafeGetTensorImpl());
    for (const auto& item : model.buffers) seen.insert(item.tensor.unsafeGetTensorImpl());
    ModuleRef::NamedTensors found;
    const auto add = [&](const ModuleRef::NamedTensors& tensors) {
      for (const auto& [name, tensor] : tensors) {
        if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
        if (!is_of_another(tensor)) found.emplace_back(name, tensor);
      }
    };
    add(fsdp.module().parameters());
    add(fsdp.module().buffers());
    return found;
  }

  static bool is_of_another(const at::Tensor& tensor) {
    const auto* listener = Accumulator::listener_of(tensor);
    return dynamic_cast<const Fsdp::State*>(listener) != nullptr || !has_memory(tensor);
  }

  std::weak_ptr<Fsdp::State> state_;
};

std::shared_ptr<Stateful> stateful(Fsdp& fsdp) { return std::make_shared<FsdpState>(fsdp); }

}  // namespace lockstep::parallel

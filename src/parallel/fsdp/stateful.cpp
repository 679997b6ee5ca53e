// What a checkpoint saves of an Fsdp.
#include "lockstep/parallel/stateful.h"

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/part_of.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/fsdp/parameter_memory.h"
#include "parallel/fsdp/state.h"

namespace lockstep::parallel {

class FsdpState : public Stateful {
 public:
  explicit FsdpState(Fsdp& fsdp) : state_(fsdp.state_) {}

  checkpoint::State state(const checkpoint::Names&) const override {
    return described(state_->plan().replicas.rank() == 0 ? Parts::Own : Parts::None);
  }

  checkpoint::State destination(const checkpoint::Saved&, const checkpoint::Names&) override {
    checkpoint::State state = described(Parts::Own);
    for (const auto& item : state_->model().parameters) {
      state.others.push_back(checkpoint::pattern_of(item.name));
    }
    return state;
  }

  void restored(const checkpoint::State&) override { state_->shards_changed(); }

  void add_names(const std::string& prefix, checkpoint::Names& names) const override {
    const auto& parameters = state_->model().parameters;
    std::map<const at::TensorImpl*, std::vector<std::string>> further;  // of tied ones
    for (const auto& [name, tensor] : state_->module().parameters()) {
      further[tensor.unsafeGetTensorImpl()].push_back(name);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [unit, flat, member] = state_->place(i);
      names.add(flat->leaf(member), prefix + "/" + parameters[i].name);
      names.add(parameters[i].tensor, prefix + "/" + parameters[i].name);
      for (const auto& name : further[parameters[i].tensor.unsafeGetTensorImpl()]) {
        names.add(flat->leaf(member), prefix + "/" + name);
        names.add(parameters[i].tensor, prefix + "/" + name);
      }
    }
    for (const auto& item : state_->model().buffers) {
      names.add(item.tensor, prefix + "/" + item.name);
    }
    for (const auto& [name, tensor] : ignored()) names.add(tensor, prefix + "/" + name);
  }

 private:
  enum class Parts { Own, None };

  checkpoint::State described(Parts parts) const {
    checkpoint::State state;
    const auto& parameters = state_->model().parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [unit, flat, member] = state_->place(i);
      const at::Tensor& leaf = flat->leaf(member);
      const auto* whole = checkpoint::part_of(leaf);
      const bool mine = parts == Parts::Own && (leaf.numel() > 0 || whole->is_of_nothing());
      if (mine) state.pieces.push_back(checkpoint::part_piece(parameters[i].name, *whole, leaf));
    }
    for (const auto& item : state_->model().buffers) {
      state.pieces.push_back(checkpoint::whole_piece(item.name, item.tensor));
    }
    for (const auto& [name, tensor] : ignored()) {
      state.pieces.push_back(checkpoint::whole_piece(name, tensor));
    }
    std::map<const at::TensorImpl*, std::string> first;
    const auto note = [&](const ModuleRef::NamedTensors& tensors) {
      for (const auto& [name, tensor] : tensors) {
        const auto [place, fresh] = first.try_emplace(tensor.unsafeGetTensorImpl(), name);
        if (!fresh) state.aliases[name] = place->second;
      }
    };
    note(state_->module().parameters());
    note(state_->module().buffers());
    return state;
  }

  // What FsdpOptions::ignore names, which every rank has whole; without what another Fsdp shards,
  // and saves.
  ModuleRef::NamedTensors ignored() const {
    std::set<const at::TensorImpl*> seen;
    const auto& model = state_->model();
    for (const auto& item : model.parameters) seen.insert(item.tensor.unsafeGetTensorImpl());
    for (const auto& item : model.buffers) seen.insert(item.tensor.unsafeGetTensorImpl());
    ModuleRef::NamedTensors found;
    const auto add = [&](const ModuleRef::NamedTensors& tensors) {
      for (const auto& [name, tensor] : tensors) {
        if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
        if (!is_of_another(tensor)) found.emplace_back(name, tensor);
      }
    };
    add(state_->module().parameters());
    add(state_->module().buffers());
    return found;
  }

  static bool is_of_another(const at::Tensor& tensor) {
    const auto* listener = Accumulator::listener_of(tensor);
    return dynamic_cast<const Fsdp::State*>(listener) != nullptr || !has_memory(tensor);
  }

  std::shared_ptr<Fsdp::State> state_;
};

std::shared_ptr<Stateful> stateful(Fsdp& fsdp) { return std::make_shared<FsdpState>(fsdp); }

}  // namespace lockstep::parallel

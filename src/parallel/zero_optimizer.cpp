#include "lockstep/parallel/zero_optimizer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/core/shard.h"
#include "parallel/model.h"
#include "parallel/packed.h"

namespace lockstep::parallel {
namespace {

// Parameters are cut at multiples of this many elements from their first, so that a vectorised
// kernel meets the same vectors and the same remainder as over the whole: the same bits.
constexpr int64_t kGrid = 1024;

// Part of a parameter that one rank updates.
struct Portion {
  size_t parameter;
  Range range;  // of its elements in memory
  at::Tensor leaf;
};

// All parameters of one dtype in one memory, the last first: nearly as their gradients lie in Ddp's
// buckets, so that a rank mostly updates with what it has just added up.
struct Flat {
  at::Tensor memory;
  std::vector<std::pair<size_t, int64_t>> places;  // parameter and first element
  std::vector<int64_t> cuts;                       // by rank, and the end
};

void check(const at::Tensor& parameter, size_t index, at::Device device) {
  const auto refuse = [&](std::string_view why) {
    throw ConfigError(fmt::format("[zero] parameter {} of shape [{}] {}", index,
                                  fmt::join(parameter.sizes(), ", "), why));
  };
  if (parameter.layout() != at::kStrided) refuse("is not dense");
  if (!parameter.is_non_overlapping_and_dense()) refuse("has overlapping or gapped memory");
  if (parameter.device() != device) {
    refuse(fmt::format("is on {}, but the group communicates on {}", parameter.device().str(),
                       device.str()));
  }
}

// The cut nearest below element `wanted` of the flat memory that is allowed.
int64_t allowed_cut(const Flat& flat, const std::vector<at::Tensor>& parameters, int64_t wanted) {
  int64_t cut = 0;
  for (const auto& [parameter, start] : flat.places) {
    if (start > wanted) break;
    const int64_t inside = (wanted - start) / kGrid * kGrid;
    cut = start + (inside < parameters[parameter].numel() ? inside : parameters[parameter].numel());
  }
  return cut;
}

// The elements in the order of memory.
at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

at::Tensor laid_out_as(const at::Tensor& place, const at::Tensor& tensor) {
  return tensor.strides() == place.strides() ? tensor : at::empty_like(place).copy_(tensor);
}

}  // namespace

struct ZeroOptimizer::State {
  Group group;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> places;  // of the parameters in the flats
  std::vector<Flat> flats;
  std::vector<Portion> portions;
  std::unique_ptr<Optimizer> optimizer;
  bool shared = false;

  void lay_out();
  void own_portions(const Flat& flat);
  bool is_elsewhere(size_t parameter) const;
  bool any_elsewhere() const;
  void copy_in();
  void alias();
  std::vector<OptimizerParamGroup> own_groups(std::vector<OptimizerParamGroup>& groups);
  void check_gradients() const;
  void point_to_gradients();
  void spread();
};

void ZeroOptimizer::State::lay_out() {
  std::map<at::ScalarType, Flat> by_dtype;
  std::map<at::ScalarType, int64_t> lengths;
  for (size_t i = parameters.size(); i-- > 0;) {
    const at::Tensor& parameter = parameters[i];
    int64_t& length = lengths[parameter.scalar_type()];
    by_dtype[parameter.scalar_type()].places.emplace_back(i, length);
    length += aligned(parameter.nbytes()) / parameter.element_size();
  }
  for (auto& [dtype, flat] : by_dtype) {
    const int64_t length = lengths[dtype];
    const auto options = parameters[flat.places.front().first].options().requires_grad(false);
    for (int rank = 0; rank < group.size(); ++rank) {
      flat.cuts.push_back(
          allowed_cut(flat, parameters, Shard{rank, group.size()}.of(length).begin));
    }
    flat.cuts.push_back(length);
    flat.memory = group.shared({length}, options);
    shared = flat.memory.defined();
    if (!shared) flat.memory = at::zeros({length}, options);
    flats.push_back(std::move(flat));
  }
}

void ZeroOptimizer::State::own_portions(const Flat& flat) {
  const int64_t begin = flat.cuts[group.rank()], end = flat.cuts[group.rank() + 1];
  for (const auto& [index, start] : flat.places) {
    const at::Tensor place = flat.memory.narrow(0, start, parameters[index].numel());
    places[index] = flat.memory.as_strided(parameters[index].sizes(), parameters[index].strides(),
                                           flat.memory.storage_offset() + start);
    const Range range{std::max(begin, start) - start, std::min(end, start + place.numel()) - start};
    if (range.size() <= 0) continue;
    portions.push_back(
        {index, range, place.narrow(0, range.begin, range.size()).detach().requires_grad_()});
  }
}

// At the start, and again after a module was loaded: that gives its parameters memory of their own.
bool ZeroOptimizer::State::is_elsewhere(size_t parameter) const {
  return parameters[parameter].const_data_ptr() != places[parameter].const_data_ptr();
}

bool ZeroOptimizer::State::any_elsewhere() const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_elsewhere(i)) return true;
  }
  return false;
}

void ZeroOptimizer::State::copy_in() {
  for (size_t i = 0; i < parameters.size() && !shared; ++i) {
    if (is_elsewhere(i)) places[i].copy_(parameters[i]);
  }
  for (const auto& [index, range, leaf] : portions) {
    if (!shared || !is_elsewhere(index)) continue;
    const at::Tensor laid_out = laid_out_as(places[index], parameters[index]);
    leaf.copy_(in_memory_order(laid_out).narrow(0, range.begin, range.size()));
  }
}

// Once all ranks have copied in.
void ZeroOptimizer::State::alias() {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_elsewhere(i)) parameters[i].set_data(places[i].detach());
  }
}

std::vector<OptimizerParamGroup> ZeroOptimizer::State::own_groups(
    std::vector<OptimizerParamGroup>& groups) {
  if (group.size() == 1) return groups;
  std::vector<OptimizerParamGroup> own;
  size_t first = 0;
  for (auto& given : groups) {
    std::vector<at::Tensor> leaves;
    for (const auto& portion : portions) {
      if (portion.parameter >= first && portion.parameter < first + given.params().size())
        leaves.push_back(portion.leaf);
    }
    first += given.params().size();
    own.push_back(given.has_options()
                      ? OptimizerParamGroup(std::move(leaves), given.options().clone())
                      : OptimizerParamGroup(std::move(leaves)));
  }
  return own;
}

void ZeroOptimizer::State::check_gradients() const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined() || gradient.layout() == at::kStrided) continue;
    throw ConfigError(
        fmt::format("[zero] the gradient of parameter {} is sparse: give such parameters an "
                    "optimizer of their own",
                    i));
  }
}

void ZeroOptimizer::State::point_to_gradients() {
  for (auto& [index, range, leaf] : portions) {
    const at::Tensor& gradient = parameters[index].grad();
    at::Tensor& own = leaf.mutable_grad();
    if (!gradient.defined()) {
      own.reset();
      continue;
    }
    const bool alike = gradient.strides() == places[index].strides();
    // Gradients stay where they are from step to step.
    const auto* place =
        static_cast<const char*>(gradient.const_data_ptr()) + range.begin * gradient.element_size();
    if (alike && own.defined() && own.const_data_ptr() == place) continue;
    own = in_memory_order(laid_out_as(places[index], gradient))
              .narrow(0, range.begin, range.size())
              .detach();
  }
}

void ZeroOptimizer::State::spread() {
  if (shared) {
    group.barrier({.tag = "zero: updated"}).wait();
    return;
  }
  for (const auto& flat : flats) {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < group.size(); ++rank) {
      parts.push_back(
          flat.memory.narrow(0, flat.cuts[rank], flat.cuts[rank + 1] - flat.cuts[rank]));
    }
    group.all_gather(parts, parts[group.rank()].clone(), {.tag = "zero: updated"}).wait();
  }
}

ZeroOptimizer::ZeroOptimizer(std::vector<OptimizerParamGroup> groups, const Group& group,
                             const Make& make)
    : state_(std::make_unique<State>()) {
  const at::NoGradGuard no_grad;
  state_->group = group;
  for (const auto& given : groups) {
    state_->parameters.insert(state_->parameters.end(), given.params().begin(),
                              given.params().end());
  }
  if (state_->parameters.empty()) throw ConfigError("[zero] no parameters to optimize");
  const auto& all = state_->parameters;
  const at::Device device = all.empty() ? at::kCPU : communicated_on(group, all.front());
  for (size_t i = 0; i < state_->parameters.size(); ++i) check(state_->parameters[i], i, device);
  if (group.size() > 1) {
    state_->lay_out();
    state_->places.resize(state_->parameters.size());
    for (const auto& flat : state_->flats) state_->own_portions(flat);
    state_->copy_in();
    group.barrier({.tag = "zero"}).wait();
    state_->alias();
  }
  state_->optimizer = make(state_->own_groups(groups));
  if (dynamic_cast<torch::optim::LBFGS*>(state_->optimizer.get()) != nullptr) {
    throw ConfigError(
        "[zero] LBFGS looks at all parameters together, so its work cannot be divided: use it as "
        "it is");
  }
}

ZeroOptimizer::ZeroOptimizer(std::vector<at::Tensor> parameters, const Group& group,
                             const Make& make)
    : ZeroOptimizer(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(parameters))},
                    group, make) {}

ZeroOptimizer::~ZeroOptimizer() = default;
ZeroOptimizer::ZeroOptimizer(ZeroOptimizer&&) noexcept = default;

void ZeroOptimizer::step() {
  const at::NoGradGuard no_grad;
  State& state = *state_;
  if (state.group.size() == 1) {
    state.optimizer->step();
    return;
  }
  state.check_gradients();
  state.point_to_gradients();
  if (state.any_elsewhere()) {
    state.copy_in();
    state.group.barrier({.tag = "zero: loaded"}).wait();
    state.alias();
  }
  state.optimizer->step();
  state.spread();
}

void ZeroOptimizer::zero_grad() {
  for (const auto& parameter : state_->parameters) parameter.mutable_grad().reset();
}

Optimizer& ZeroOptimizer::optimizer() { return *state_->optimizer; }
bool ZeroOptimizer::shares_parameters() const { return state_->shared; }

int64_t ZeroOptimizer::own_elements() const {
  int64_t count = 0;
  if (state_->group.size() == 1) {
    for (const auto& parameter : state_->parameters) count += parameter.numel();
  }
  for (const auto& portion : state_->portions) count += portion.range.size();
  return count;
}

bool ZeroOptimizer::shadow() {
  step();
  return true;
}

void ZeroOptimizer::save(torch::serialize::OutputArchive& archive) const {
  archive.write("place", torch::tensor({int64_t{state_->group.rank()},
                                        int64_t{state_->group.size()}, own_elements()}));
  torch::serialize::OutputArchive own(archive.compilation_unit());
  state_->optimizer->save(own);
  archive.write("optimizer", own);
}

void ZeroOptimizer::load(torch::serialize::InputArchive& archive) {
  at::Tensor place;
  archive.read("place", place);
  const auto saved = [&](int64_t i) { return place[i].item<int64_t>(); };
  if (saved(0) != state_->group.rank() || saved(1) != state_->group.size() ||
      saved(2) != own_elements()) {
    throw ConfigError(fmt::format(
        "[zero] load: this is the part of rank {} of {} with {} elements, but here is rank {} of "
        "{} with {}: load each rank's own "
        "file, at the world size it was saved at",
        saved(0), saved(1), saved(2), state_->group.rank(), state_->group.size(), own_elements()));
  }
  torch::serialize::InputArchive own;
  archive.read("optimizer", own);
  state_->optimizer->load(own);
}

}  // namespace lockstep::parallel

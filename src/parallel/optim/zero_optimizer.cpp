#include "lockstep/parallel/zero_optimizer.h"

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "checkpoint/optimizer_fields.h"
#include "comm/together.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "lockstep/core/shard.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/ddp/packed.h"
#include "parallel/hooks/state.h"
#include "parallel/layout/common_memory.h"
#include "parallel/layout/flat_memory.h"
#include "parallel/optim/fused.h"
#include "parallel/optim/zero_check.h"
#include "parallel/optim/zero_parts.h"

namespace lockstep::parallel {
namespace {

constexpr std::string_view kMovedAlone =
    "or one rank alone gave parameters other memory (set_data, load)";
constexpr std::string_view kUpdatedOtherwise =
    "or the ranks' learning rates or other options differ, or one alone gave parameters other "
    "memory (set_data, load)";

// Of all groups, which then list each once, too.
std::vector<at::Tensor> listed_once(std::vector<OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> all;
  std::map<const at::TensorImpl*, size_t> group_of;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<at::Tensor> once;
    for (const auto& parameter : groups[i].params()) {
      const auto [place, fresh] = group_of.try_emplace(parameter.unsafeGetTensorImpl(), i);
      if (fresh) once.push_back(parameter);
      if (place->second == i) continue;
      throw ConfigError(fmt::format("[zero] a parameter of shape [{}] is in groups {} and {}",
                                    fmt::join(parameter.sizes(), ", "), place->second, i));
    }
    all.insert(all.end(), once.begin(), once.end());
    groups[i].params() = std::move(once);
  }
  return all;
}

at::Tensor laid_out_as(const at::Tensor& place, const at::Tensor& tensor) {
  return tensor.strides() == place.strides() ? tensor : at::empty_like(place).copy_(tensor);
}

}  // namespace

void ZeroOptimizer::Parts::lay_out(bool share) {
  std::map<at::ScalarType, Flat> by_dtype;
  for (size_t i = parameters.size(); i-- > 0;) {
    const at::ScalarType dtype = parameters[i].scalar_type();
    auto& flat = by_dtype.try_emplace(dtype, Flat{FlatLayout(dtype, kCacheLine), {}}).first->second;
    flat.layout.add(fmt::format("{}", i), parameters[i].numel());
    flat.members.push_back(i);
  }
  for (auto& [dtype, flat] : by_dtype) {
    flat.cuts = flat.layout.cuts(group.size(), kCutGrid);
    flats.push_back(std::move(flat));
  }
  places = parameters;
  take_memory(share);
  for (const auto& flat : flats) {
    const Range own{flat.cuts[group.rank()], flat.cuts[group.rank() + 1]};
    for (const auto& [member, range] : flat.layout.portions(own)) {
      const size_t index = flat.members[member];
      const at::Tensor leaf = part_of(index, range);
      // Others, such as codes, have no gradient.
      const bool may_train = leaf.is_floating_point() || leaf.is_complex();
      portions.push_back({index, range, leaf.requires_grad_(may_train)});
    }
  }
}

// A parameter's place keeps its sizes and strides.
void ZeroOptimizer::Parts::take_memory(bool share) {
  for (auto& flat : flats) {
    const auto options = places[flat.members.front()].options().requires_grad(false);
    flat.memory = share ? group.shared({flat.layout.numel()}, options) : at::Tensor();
    shared = flat.memory.defined();
    if (shared) {
      note_shared(flat.memory);
    } else {
      flat.memory = group.empty({flat.layout.numel()}, options);
    }
    const auto& members = flat.layout.members();
    for (size_t member = 0; member < members.size(); ++member) {
      at::Tensor& place = places[flat.members[member]];
      place = flat.memory.as_strided(place.sizes(), place.strides(),
                                     flat.memory.storage_offset() + members[member].begin);
    }
  }
}

at::Tensor ZeroOptimizer::Parts::part_of(size_t parameter, const Range& range) const {
  return in_memory_order(places[parameter]).narrow(0, range.begin, range.size()).detach();
}

// At the start, and again after a module was loaded: that gives its parameters memory of their own.
bool ZeroOptimizer::Parts::is_elsewhere(size_t parameter) const {
  return parameters[parameter].const_data_ptr() != places[parameter].const_data_ptr();
}

bool ZeroOptimizer::Parts::any_elsewhere() const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_elsewhere(i)) return true;
  }
  return false;
}

// Values of another dtype would be copied back into the old one, and the conversion be undone.
void ZeroOptimizer::Parts::check_same_type() const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].scalar_type() == places[i].scalar_type() &&
        parameters[i].sizes() == places[i].sizes()) {
      continue;
    }
    throw ConfigError(fmt::format(
        "[zero] parameter {} is of {} and shape [{}] now, and was of {} and [{}] when it was "
        "divided: construct another ZeroOptimizer after the model was converted",
        i, at::toString(parameters[i].scalar_type()), fmt::join(parameters[i].sizes(), ", "),
        at::toString(places[i].scalar_type()), fmt::join(places[i].sizes(), ", ")));
  }
}

void ZeroOptimizer::Parts::copy_in() {
  for (size_t i = 0; i < parameters.size() && !shared; ++i) {
    if (is_elsewhere(i)) places[i].copy_(parameters[i]);
  }
  for (const auto& [index, range, leaf] : portions) {
    if (!shared || !is_elsewhere(index)) continue;
    const at::Tensor laid_out = laid_out_as(places[index], parameters[index]);
    leaf.copy_(in_memory_order(laid_out).narrow(0, range.begin, range.size()));
  }
}

// To new memory: in the old one another parameter may lie by now, or a tensor of the program. The
// optimizer's state stays with the leaves.
void ZeroOptimizer::Parts::move() {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  group.barrier({.label = "zero: loaded", .advice = kMovedAlone}).wait();
  for (const auto& flat : flats) {
    if (shared) note_common(flat.memory);
  }
  take_memory(shared);
  for (const auto& [index, range, leaf] : portions) leaf.set_data(part_of(index, range));
  copy_in();
  if (shared) group.barrier({.label = "zero: loaded"}).wait();
  alias();
}

// Once all ranks have copied in.
void ZeroOptimizer::Parts::alias() {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_elsewhere(i)) parameters[i].set_data(places[i].detach());
  }
}

std::vector<OptimizerParamGroup> ZeroOptimizer::Parts::own_groups(
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

void ZeroOptimizer::Parts::check_gradients() const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined() || gradient.layout() == at::kStrided) continue;
    throw ConfigError(
        fmt::format("[zero] the gradient of parameter {} is sparse: give such parameters an "
                    "optimizer of their own",
                    i));
  }
}

void ZeroOptimizer::Parts::point_to_gradients() {
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

// Each rank has updated its part by its own options: that they differ shows nowhere else.
void ZeroOptimizer::Parts::call(
    const std::function<void(const comm::CallOptions&)>& collective) const {
  const std::vector<double> numbers = checkpoint::option_numbers(*optimizer);
  const uint64_t print = fingerprint(std::string_view(reinterpret_cast<const char*>(numbers.data()),
                                                      numbers.size() * sizeof(double)));
  const std::string label = numbers.empty()
                                ? "zero: updated"
                                : fmt::format("zero: updated, rate {:.6g}", numbers.front());
  collective({.label = label,
              .context = {.name = "ZeroOptimizer",
                          .number = caller,
                          .pass = static_cast<uint32_t>(print ^ (print >> 32))},
              .advice = kUpdatedOtherwise});
}

void ZeroOptimizer::Parts::spread() {
  call([&](const comm::CallOptions& options) {
    if (shared) {
      group.barrier(options).wait();
      return;
    }
    for (const auto& flat : flats) {
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < group.size(); ++rank) {
        const auto part =
            flat.memory.narrow(0, flat.cuts[rank], flat.cuts[rank + 1] - flat.cuts[rank]);
        parts.push_back(as_reals(part));
      }
      group.all_gather(parts, parts[group.rank()], options).wait();
    }
  });
}

// What the inner optimizer refuses on this rank alone, whose part may be of another dtype, the
// others learn, too.
void ZeroOptimizer::Parts::step() {
  try {
    optimizer->step();
  } catch (...) {
    group.transport().abort_all(
        fmt::format("[zero] rank {}: {}", group.rank(), comm::thrown_text()));
    throw;
  }
}

// Those of the leaves are not the parameters', of which other ranks have updated parts, too.
void ZeroOptimizer::Parts::count_updates() const {
  std::vector<at::Tensor> updated;
  std::ranges::copy_if(parameters, std::back_inserter(updated),
                       [](const at::Tensor& parameter) { return parameter.grad().defined(); });
  count_versions(updated);
}

ZeroOptimizer::ZeroOptimizer(std::vector<OptimizerParamGroup> groups, const Group& group,
                             const Make& make, const ZeroOptions& options)
    : Optimizer(std::vector<OptimizerParamGroup>(), nullptr), parts_(std::make_unique<Parts>()) {
  group.refuse_python_ranks("ZeroOptimizer");
  if (!make) throw ConfigError("[zero] the function that makes the optimizer is empty");
  track_zero_optimizers();
  const c10::InferenceMode normal(false);  // what is made here is trained outside of it, too
  const at::NoGradGuard no_grad;
  parts_->group = group;
  parts_->parameters = listed_once(groups);
  const auto& all = parts_->parameters;
  check_same_parameters(groups, all, group);
  if (group.size() > 1) {
    parts_->caller = group.next_caller();
    refuse_local_gradients(all, "zero");
    parts_->lay_out(options.share_parameters);
    parts_->copy_in();
    group.barrier({.label = "zero"}).wait();
    parts_->alias();
    parts_->note_versions();
  }
  comm::together(group, "zero", [&] {
    parts_->optimizer = make(parts_->own_groups(groups));
    const auto& made = parts_->optimizer;
    if (!made || made->param_groups().size() != groups.size()) {
      throw ConfigError(fmt::format(
          "[zero] the function that makes the optimizer has to give it the {} groups "
          "that it gets, and returned {}",
          groups.size(), made ? fmt::format("one with {}", made->param_groups().size()) : "none"));
    }
  });
  if (dynamic_cast<torch::optim::LBFGS*>(parts_->optimizer.get()) != nullptr) {
    throw ConfigError(
        "[zero] LBFGS looks at all parameters together, so its work cannot be sharded: use it as "
        "it is");
  }
  defaults_ = parts_->optimizer->defaults().clone();
  for (size_t i = 0; i < groups.size(); ++i) {
    param_groups_.emplace_back(groups[i].params(),
                               parts_->optimizer->param_groups()[i].options().clone());
  }
  check_same_options(*parts_->optimizer, *this, group);
}

ZeroOptimizer::ZeroOptimizer(std::vector<at::Tensor> parameters, const Group& group,
                             const Make& make, const ZeroOptions& options)
    : ZeroOptimizer(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(parameters))},
                    group, make, options) {}

ZeroOptimizer::~ZeroOptimizer() {
  if (!parts_ || !parts_->shared) return;
  for (const auto& flat : parts_->flats) note_common(flat.memory);
}
ZeroOptimizer::ZeroOptimizer(ZeroOptimizer&&) noexcept = default;

void ZeroOptimizer::check_groups() const {
  size_t i = 0;
  bool same = true;
  const auto& all = parts_->parameters;
  for (const auto& group : param_groups_) {
    for (const auto& parameter : group.params()) {
      same = same && i < all.size() && parameter.is_same(all[i]);
      ++i;
    }
  }
  if (same && i == all.size() && param_groups_.size() == parts_->optimizer->param_groups().size()) {
    return;
  }
  throw ConfigError(
      fmt::format("[zero] it shards {} parameters, and its groups now hold others or {}: construct "
                  "another ZeroOptimizer when parameters are added or replaced",
                  all.size(), i));
}

void ZeroOptimizer::check_state() const {
  if (state_.empty()) return;
  throw ConfigError(
      "[zero] something was put into state(), which no step uses, since the state is that of the "
      "ranks' parts: restore it by load() or a Checkpointer");
}

// What schedulers set is this rank's too.
void ZeroOptimizer::give_options() const {
  auto& own = parts_->optimizer->param_groups();
  for (size_t i = 0; i < own.size(); ++i) own[i].set_options(param_groups_[i].options().clone());
}

at::Tensor ZeroOptimizer::step(LossClosure closure) {
  const at::Tensor loss = loss_of(closure);
  const at::NoGradGuard no_grad;
  check_groups();
  check_state();
  give_options();
  Parts& parts = *parts_;
  if (parts.group.size() == 1) {
    parts.optimizer->step();
    return loss;
  }
  refuse_local_gradients(parts.parameters, "zero");
  parts.check_same_type();
  parts.check_gradients();
  check_same_gradients(parts.parameters, parts.group);
  parts.point_to_gradients();
  const at::Tensor written = parts.written();
  if (parts.any_elsewhere()) {
    if (const auto text = tied_by_memory(parts.parameters); !text.empty()) {
      throw ConfigError("[zero] " + text);
    }
    parts.move();
  }
  // A rank may still read the one copy, as for a metric after its backward().
  if (parts.shared) parts.meet(written);
  parts.step();
  parts.spread();
  parts.count_updates();
  parts.note_versions();
  return loss;
}

bool ZeroOptimizer::shares_parameters() const { return parts_->shared; }

int64_t ZeroOptimizer::own_elements() const {
  int64_t count = 0;
  if (parts_->group.size() == 1) {
    for (const auto& parameter : parts_->parameters) count += parameter.numel();
  }
  for (const auto& portion : parts_->portions) count += portion.range.size();
  return count;
}

bool ZeroOptimizer::shadow() {
  step();
  return true;
}

void ZeroOptimizer::save(torch::serialize::OutputArchive& archive) const {
  check_groups();
  check_state();
  give_options();
  archive.write("place", torch::tensor({int64_t{parts_->group.rank()},
                                        int64_t{parts_->group.size()}, own_elements()}));
  torch::serialize::OutputArchive own(archive.compilation_unit());
  parts_->optimizer->save(own);
  archive.write("optimizer", own);
}

void ZeroOptimizer::load(torch::serialize::InputArchive& archive) {
  at::Tensor place;
  archive.read("place", place);
  const auto saved = [&](int64_t i) { return place[i].item<int64_t>(); };
  if (saved(0) != parts_->group.rank() || saved(1) != parts_->group.size() ||
      saved(2) != own_elements()) {
    throw ConfigError(fmt::format(
        "[zero] load: this is the part of rank {} of {} with {} elements, but here is rank {} of "
        "{} with {}: load each rank's own "
        "file, at the world size it was saved at",
        saved(0), saved(1), saved(2), parts_->group.rank(), parts_->group.size(), own_elements()));
  }
  torch::serialize::InputArchive own;
  archive.read("optimizer", own);
  parts_->optimizer->load(own);
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].set_options(parts_->optimizer->param_groups()[i].options().clone());
  }
}

}  // namespace lockstep::parallel

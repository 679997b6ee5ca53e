// What Ddp does, by hand, in one process that holds the state of all ranks.
#include <torch/torch.h>

#include <bit>
#include <set>
#include <span>

#include "random/training/training.h"

namespace lockstep::test::training {
namespace {

// n addends, split at the largest power of two below n.
at::Tensor tree_sum(const std::vector<at::Tensor>& addends, size_t begin, size_t end) {
  if (end - begin == 1) return addends[begin];
  const size_t half = std::bit_floor(end - begin - 1);
  return tree_sum(addends, begin, begin + half) + tree_sum(addends, begin + half, end);
}

// Collectives see complex numbers as pairs of real ones.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() && !tensor.is_sparse() ? at::view_as_real(tensor) : tensor;
}

at::Tensor average_of(const std::vector<at::Tensor>& addends, int64_t divisor,
                      const DdpOptions& options) {
  if (addends[0].is_sparse()) return tree_sum(addends, 0, addends.size()).coalesce() / divisor;
  std::vector<at::Tensor> reals;
  for (const auto& addend : addends) {
    const auto real = as_real(addend);
    reals.push_back(options.reduce_dtype ? real.to(*options.reduce_dtype) : real);
  }
  auto average = tree_sum(reals, 0, reals.size()) / divisor;
  average = average.to(as_real(addends[0]).scalar_type());
  return addends[0].is_complex() ? at::view_as_complex(average) : average;
}

// The lanes in groups of so many; 0: all.
std::vector<std::span<Lane>> together(Training& training, int ranks) {
  const std::span<Lane> all(training.lanes);
  if (ranks == 0) return {all};
  std::vector<std::span<Lane>> groups;
  const auto size = static_cast<size_t>(ranks);
  for (size_t begin = 0; begin < all.size(); begin += size)
    groups.push_back(all.subspan(begin, std::min(size, all.size() - begin)));
  return groups;
}

// Of these lanes.
void average_gradient(Training& training, std::span<Lane> lanes, size_t model,
                      const std::string& name) {
  std::vector<at::Tensor> parameters;
  bool reached = false, sparse = false;
  for (auto& lane : lanes) {
    parameters.push_back(lane.models[model].net->named_parameters()[name]);
    const at::Tensor& gradient = parameters.back().grad();
    if (!lane.active) continue;
    const bool is_reached = lane.models[model].reached[parameters.back().unsafeGetTensorImpl()];
    const bool is_lacking = !is_reached && parameters.back().requires_grad();
    if (is_lacking && lanes.size() > 1 && training.options.unused == Unused::Error)
      throw Refused("'" + name + "' got no gradient");
    reached = reached || is_reached;
    sparse = sparse || (gradient.defined() && gradient.is_sparse());
  }
  if (!reached) return;
  // What an earlier backward left is the same average on all ranks, with a batch or without.
  const auto first = std::ranges::find_if(lanes, &Lane::active);
  Model& front = first->models[model];
  const at::Tensor own = front.net->named_parameters()[name];
  at::Tensor earlier;
  if (!training.rules.divides_by_active) {
    const void* key = own.unsafeGetTensorImpl();
    earlier = front.reached[key] ? front.earlier[key] : own.grad();
  }
  std::vector<at::Tensor> addends;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (lanes[i].active && gradient.defined()) {
      addends.push_back(gradient.detach());
    } else if (!lanes[i].active && earlier.defined()) {
      addends.push_back(earlier);
    } else {
      const auto zero = at::zeros_like(parameters[i].detach());
      addends.push_back(sparse ? at::zeros(zero.sizes(), zero.options().layout(at::kSparse))
                               : zero);
    }
  }
  const auto divisor = training.rules.divides_by_active
                           ? static_cast<size_t>(std::ranges::count_if(lanes, &Lane::active))
                           : lanes.size();
  const auto result = average_of(addends, static_cast<int64_t>(divisor), training.options);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (lanes[i].active || training.rules.everybody_updates) {
      parameters[i].mutable_grad() = result.clone();
    }
  }
}

}  // namespace

void average_buffers(Training& training, size_t model) {
  const auto mode = training.options.buffers;
  const auto active = training.active();
  for (const auto& item : active[0]->models[model].net->named_buffers()) {
    at::Tensor value = item.value();
    if (mode == Buffers::Average && value.is_floating_point()) {
      std::vector<at::Tensor> addends;
      for (auto& lane : training.lanes) {
        const auto buffer = lane.models[model].net->named_buffers()[item.key()];
        addends.push_back(lane.active ? buffer : at::zeros_like(buffer));
      }
      value = tree_sum(addends, 0, addends.size()) / static_cast<int64_t>(active.size());
    }
    value = value.clone();
    for (auto& lane : training.lanes) {
      // A graph that has saved it may run backward once more.
      lane.models[model].net->named_buffers()[item.key()].variable_data().copy_(value);
    }
  }
}

void watch(Model& model, const at::Tensor& parameter) {
  at::TensorImpl* key = parameter.unsafeGetTensorImpl();
  parameter.register_hook([&model, key](const at::Tensor& gradient) {
    if (!std::exchange(model.reached[key], true)) {
      // A hook that held the parameter would keep it alive.
      const at::Tensor self(c10::intrusive_ptr<at::TensorImpl>::reclaim_copy(key));
      model.earlier[key] = self.grad().defined() ? self.grad().detach().clone() : at::Tensor();
    }
    return gradient;
  });
}

void watch(Model& model) {
  for (const auto& parameter : model.net->parameters()) {
    if (parameter.requires_grad()) watch(model, parameter);
  }
}

void average(Training& training, size_t model) {
  const at::NoGradGuard no_grad;
  const Net& net = *training.lanes[0].models[model].net;
  const auto& ignored = training.options.ignore;
  const bool is_local = training.lanes[0].models[model].passes++ >= training.rules.local_from;
  std::set<const void*> done;  // a tied parameter has two names
  for (const auto& item : net.named_parameters()) {
    if (!done.insert(item.value().unsafeGetTensorImpl()).second) continue;
    if (!item.value().requires_grad() || std::ranges::count(ignored, item.key())) continue;
    for (const auto some : together(training, is_local ? training.rules.local_ranks : 0))
      average_gradient(training, some, model, item.key());
  }
  if (!is_local && training.options.buffers != Buffers::None) average_buffers(training, model);
  for (auto& lane : training.lanes) {
    lane.models[model].reached.clear();
    lane.models[model].earlier.clear();
  }
}

void average_parameters(Training& training, int ranks) {
  const at::NoGradGuard no_grad;
  for (size_t model = 0; model < training.lanes[0].models.size(); ++model) {
    std::set<const void*> done;
    for (const auto& item : training.lanes[0].models[model].net->named_parameters()) {
      if (!done.insert(item.value().unsafeGetTensorImpl()).second) continue;
      for (const auto some : together(training, ranks)) {
        std::vector<at::Tensor> own;
        for (const Lane& lane : some) {
          own.push_back(lane.models[model].net->named_parameters()[item.key()].detach());
        }
        const auto average = average_of(own, std::ssize(own), {});
        for (const auto& parameter : own) parameter.copy_(average);
      }
    }
  }
}

bool is_ignored(const Training& training, const Net& net, const at::Tensor& parameter) {
  const auto parameters = net.named_parameters();
  return std::ranges::any_of(training.options.ignore, [&](const std::string& name) {
    return parameters.contains(name) && parameters[name].is_same(parameter);
  });
}

void take_over(Training& training, const std::vector<int>& present) {
  const at::NoGradGuard no_grad;
  if (present.size() == training.lanes.size()) return;
  for (size_t model = 0; model < training.lanes[0].models.size(); ++model) {
    const Net& from = *training.lanes[present.front()].models[model].net;
    for (auto& lane : training.lanes) {
      const Net& to = *lane.models[model].net;
      for (const auto& item : from.named_parameters()) {
        if (is_ignored(training, from, item.value())) continue;
        to.named_parameters()[item.key()].copy_(item.value());
      }
      for (const auto& item : from.named_buffers()) {
        to.named_buffers()[item.key()].copy_(item.value());
      }
    }
  }
}

}  // namespace lockstep::test::training

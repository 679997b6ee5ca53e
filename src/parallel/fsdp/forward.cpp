// The part of Fsdp that gives parameters their memory, and runs units.
#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

#include "comm/device/capture.h"
#include "lockstep/core/error.h"
#include "parallel/fsdp/call_count.h"
#include "parallel/fsdp/state.h"
#include "parallel/layout/common_memory.h"

namespace lockstep::parallel {

void Fsdp::State::gather(Unit& unit) {
  if (unit.gathering || unit.shown) return;
  comm::refuse_capture(device(), "[fsdp] gathering a unit's parameters",
                       "Fsdp makes and frees its memory in each step: capture a step of Ddp");
  comm::CallOptions options = call(unit.name);
  // Units may have equal sizes: without the context a rank that calls another unit would compute
  // with that one's values.
  options.context = {.name = "Fsdp unit", .number = caller_, .pass = unit.number};
  in_group([&] {
    for (auto& flat : unit.flats) flat.start_gather(options);
  });
  unit.gathering = true;
}

void Fsdp::State::show(Unit& unit) {
  gather(unit);
  in_group([&] {
    for (auto& flat : unit.flats) flat.show();
  });
  unit.gathering = false;
  unit.shown = true;
}

void Fsdp::State::hide(Unit& unit) {
  if (unit.gathering) show(unit);  // the gather that was begun ahead is not needed, but has to end
  for (auto& flat : unit.flats) flat.hide();
  unit.shown = false;
}

void Fsdp::State::hide_unused() {
  for (const auto& unit : units_) {
    if (unit->uses == 0 && (unit->shown || unit->gathering)) hide(*unit);
  }
}

void Fsdp::State::wait_for_host() {
  for (const auto& unit : units_) {
    for (auto& flat : unit->flats) flat.wait_for_host();
  }
}

void Fsdp::State::open(Unit& unit) {
  if (!unit.shown) show(unit);
  ++unit.uses;
}

void Fsdp::State::close(Unit& unit, After after) {
  if (--unit.uses > 0 || after == After::Keep || !unit.shown) return;
  for (auto& flat : unit.flats) {
    if (after == After::Reshard) flat.keep_nearby();
    if (after == After::Free) flat.drop_nearby();
  }
  hide(unit);
}

// The unit that the last forward called `step` places after this one.
void Fsdp::State::prefetch(const Unit& unit, int step) {
  if (plan_.shares) return;
  const auto& order = step > 0 ? order_before_ : order_now_;
  auto place = step > 0 ? static_cast<std::ptrdiff_t>(order_now_.size())
                        : std::ranges::find(order, &unit) - order.begin();
  if (step < 0) --place;
  if (place < 0 || place >= std::ssize(order)) return;
  const auto whole = std::ranges::count_if(units_, [](const auto& other) {
    return other->uses == 0 && (other->shown || other->gathering);
  });
  if (whole < plan_.options.max_unsharded_units) gather(*order[place]);
}

// Shards may have been written since the last forward. All ranks have done that when the barrier
// returns.
void Fsdp::State::publish() {
  const auto each = [&](const auto& act) {
    for (const auto& unit : units_) std::ranges::for_each(unit->flats, act);
  };
  each([](const UnitFlat& flat) { flat.check_leaves(); });
  refuse_early_writes();
  const bool is_changed = stale_ || is_written();
  // After a backward() that threw units may still be whole.
  if (is_changed || may_be_written_) hide_unused();
  if (is_changed) {
    each([](UnitFlat& flat) { flat.publish(); });
  } else if (may_be_written_) {
    // Past autograd, as by data(), which leaves no trace.
    each([](UnitFlat& flat) {
      flat.drop_nearby();
      flat.share_values();
    });
  }
  stale_ = may_be_written_ = false;
  meet("forward");
}

// Since the last forward, when other ranks may still have computed with what was written over.
void Fsdp::State::refuse_early_writes() {
  if (!std::exchange(may_be_read_, false) || stale_ || !is_written()) return;
  throw ConfigError(
      whole_ ? "[fsdp] shards were written between a forward after unshard() and reshard(), when "
               "other ranks may still have computed with them: call reshard() before an "
               "optimizer's step()"
             : "[fsdp] shards were written after a forward that has had no backward(), when other "
               "ranks may still have computed with them: run such a forward under "
               "torch::NoGradGuard");
}

void Fsdp::State::find_writes(Unit& unit) {
  for (auto& flat : unit.flats) {
    if (auto name = flat.take_written(); written_.empty()) written_ = std::move(name);
  }
}

// Memory that ranks share has then values that depend on which of them wrote last; other memory is
// freed, or gathered again.
std::string Fsdp::State::take_objection_to_writes() {
  for (const auto& unit : units_) find_writes(*unit);
  if (written_.empty()) return {};
  return fmt::format(
      "parameter '{}' was written to by forward(), or between unshard() and reshard(), where "
      "parameters are to be read only: let a forward that initialises parameters come before the "
      "Fsdp, and write to fsdp.parameters() afterwards",
      std::exchange(written_, {}));
}

// Where no pass follows that would tell the other ranks.
void Fsdp::State::refuse_writes() {
  if (const auto text = take_objection_to_writes(); !text.empty()) {
    throw ConfigError(fmt::format("[fsdp] rank {}: {}", plan_.all.rank(), text));
  }
}

bool Fsdp::State::is_written() const {
  return std::ranges::any_of(units_, [](const auto& unit) {
    return std::ranges::any_of(unit->flats, &UnitFlat::is_written);
  });
}

void Fsdp::State::meet(std::string_view label) {
  if (plan_.others_read()) in_group([&] { plan_.shards.barrier(call(label)).wait(); });
}

void Fsdp::State::begin_forward() {
  if (whole_) {
    if (!is_in_lane()) unshard();
    return;
  }
  order_before_ = std::move(order_now_);
  order_now_.clear();
  // Ranks may have different numbers of lanes, so the barrier came before the first.
  if (!is_in_lane()) publish();
}

CallLayer::Tensors Fsdp::State::cast(const CallLayer::Tensors& inputs) const {
  if (!plan_.options.param_dtype) return inputs;
  CallLayer::Tensors all;
  for (const auto& tensor : inputs) {
    all.push_back(tensor.defined() && tensor.is_floating_point()
                      ? tensor.to(*plan_.options.param_dtype)
                      : tensor);
  }
  return all;
}

// A parameter that came after the Fsdp keeps its dtype, which param_dtype does not convert.
void Fsdp::State::refuse_other_dtype(const c10::Error& error) {
  if (!plan_.options.param_dtype) return;
  const auto change = module_.difference();
  if (change.empty()) return;
  throw ConfigError(fmt::format(
      "[fsdp] {} after Fsdp was attached: construct it again, after unshard(). Inputs "
      "come in param_dtype {}, and forward() threw: {}",
      change, c10::toString(*plan_.options.param_dtype), error.what_without_backtrace()));
}

void Fsdp::State::watch_call(Unit& unit, const CallLayer::Tensors& inputs,
                             const CallLayer::Tensors& outputs, uint64_t since) {
  const auto call = std::make_shared<Call>(weak_from_this(), unit);
  // An input that is handed on has its gradient when the call's backward is over, and a leaf would
  // keep the hook.
  const auto is_older = [&](const at::Tensor& output) {
    if (is_made_since(output, since)) return false;
    return output.is_leaf() || std::ranges::any_of(inputs, [&](const at::Tensor& input) {
             return input.is_same(output);
           });
  };
  const auto watch = [&](const at::TensorBase& output) {
    output.register_hook(
        [state = weak_from_this(), &unit, call](const at::TensorBase&) -> at::TensorBase {
          if (const auto owner = state.lock()) owner->before_backward(unit, *call);
          return {};
        });
  };
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad() || is_older(output)) continue;
    watch(output);
    // A view that is changed in place gets its gradient through what it is a view of.
    if (output.is_view() && is_made_since(at::Tensor(output._base()), since)) watch(output._base());
  }
  // The root unit's parameters stay to the end: its graph is the whole model's.
  if (unit.is_root) return;
  const auto edges = edges_of(outputs, since, device());
  call->edges = edges.size();
  for (size_t i = 0; i < edges.size(); ++i) watch_edge(*edges[i], call, i);
}

CallLayer::Tensors Fsdp::State::forward(Unit& unit, const CallLayer::Tensors& inputs,
                                        const CallLayer::Body& body) {
  // Activation checkpointing calls units again within backward.
  const bool recomputes = torch::autograd::get_current_graph_task_id() != -1;
  const bool outermost = depth_ == 0 && !recomputes;
  if (outermost) begin_forward();
  struct Depth {
    explicit Depth(int& d) : depth(d) { ++depth; }
    ~Depth() { --depth; }
    int& depth;
  };
  struct Opened {
    State& state;
    Unit& unit;
    After after = After::Free;
    ~Opened() { state.close(unit, after); }
  };
  bool in_graph = false;
  CallLayer::Tensors outputs;
  {
    const Depth depth(depth_);
    open(unit);
    Opened opened{*this, unit};
    // Between unshard() and reshard() nothing is gathered, and ranks may call different units.
    if (!recomputes && !whole_) {
      order_now_.push_back(&unit);
      if (plan_.options.forward_prefetch) prefetch(unit, 1);
    }
    const uint64_t since = at::sequence_number::peek();
    const auto given = cast(inputs);
    try {
      outputs = body(given);
    } catch (const c10::Error& error) {
      refuse_other_dtype(error);
      throw;
    }
    find_writes(unit);
    in_graph = at::GradMode::is_enabled() && std::ranges::any_of(outputs, [](const auto& output) {
                 return output.defined() && output.requires_grad();
               });
    if (in_graph) {
      watch_call(unit, given, outputs, since);
      // Its backward is next.
      if (unit.is_root || !plan_.options.reshard_after_forward) {
        opened.after = After::Keep;
      } else if (plan_.resharded && !recomputes) {
        opened.after = After::Reshard;
      }
    }
  }
  if (outermost && (in_graph || whole_) && plan_.others_read()) may_be_read_ = true;
  if (!outermost || in_graph || whole_) return outputs;
  hide_unused();
  if (is_in_lane()) return outputs;
  // No rank may write to its shards while another, or a device, still reads.
  wait_for_host();
  meet("no_grad");
  may_be_written_ = true;
  refuse_writes();
  return outputs;
}

void Fsdp::State::unshard() {
  if (depth_ > 0 || backward_.is_open()) {
    throw ConfigError("[fsdp] unshard() within a forward or backward: call it outside of them");
  }
  // An optimizer may have made a step since.
  if (whole_ && !stale_ && !is_written()) return;
  refuse_early_writes();
  end_whole();
  stale_ = true;
  if (!is_in_lane()) publish();
  for (const auto& unit : units_) open(*unit);
  wait_for_host();
  whole_ = true;
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) note_unsharded(flat.leaf(0));
  }
}

void Fsdp::State::end_whole() {
  if (!std::exchange(whole_, false)) return;
  for (const auto& unit : units_) {
    for (const auto& flat : unit->flats) forget_unsharded(flat.leaf(0));
    close(*unit, After::Free);
  }
}

void Fsdp::State::reshard() {
  if (!whole_) return;
  refuse_early_writes();
  end_whole();
  meet("reshard");
  refuse_writes();
}

}  // namespace lockstep::parallel

// The part of Fsdp that averages gradients while backward() still runs.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "parallel/ddp/consistency/compare_ranks.h"
#include "parallel/fsdp/call_count.h"
#include "parallel/fsdp/state.h"
#include "parallel/lanes/rules.h"

namespace lockstep::parallel {
namespace {

// What ranks tell each other of every trainable parameter at the end of a pass.
enum Told : size_t { kReached, kFrozen, kHasPrior, kHasNoPrior, kTold };

}  // namespace

size_t Fsdp::State::count_flags() const { return kTold * trainable_.size(); }

void Fsdp::State::begin_backward() {
  if (backward_.is_open()) return;
  // A child by fork() has none of the memory that ranks share.
  if (plan_.all.size() > 1) plan_.all.transport().unfinished()->check_process("backward");
  // Collectives that a backward() left in flight when it threw still read and write the memory of
  // gradients.
  while (!in_flight_.empty()) finish_oldest();
  drop_cleared();
  std::ranges::fill(arrived_, false);
  for (const auto& unit : units_) {
    unit->fired = 0;
    unit->reduced = unit->ready = false;
    unit->missing = unit->trainable();
  }
  backward_.begin(weak_from_this(), &State::end_backward, &State::abandon_backward);
}

void Fsdp::State::guard(size_t parameter) {
  model().parameters[parameter].tensor.mutable_grad() = guards_[parameter];
  guarded_[parameter] = true;
}

// The module's zero_grad() takes away guards, which is all that it can reach.
void Fsdp::State::drop_cleared() {
  for (const size_t i : trainable_) {
    if (!guarded_[i] || model().parameters[i].tensor.grad().defined()) continue;
    guarded_[i] = false;
    places_[i].flat->drop_gradient(places_[i].member);
    if (!is_in_lane()) reached_[i] = false;  // otherwise also of the lanes before
  }
}

// A gradient of what the call returned is known, so that its backward begins.
void Fsdp::State::before_backward(Unit& unit, Call& call) {
  begin_backward();
  if (!call.fired) {
    call.count();
    call.enter();
    fired_.push_back(call.weak_from_this());
    ++unit.fired;
    // A unit that activation checkpointing runs twice gets all of its gradients twice.
    if (unit.missing == 0) {
      unit.missing = unit.trainable();
      for (const auto& flat : unit.flats) {
        for (const size_t i : flat.members()) arrived_[i] = false;
      }
    }
  }
  if (unit.backward_open) return;
  unit.backward_open = true;
  for (auto& flat : unit.flats) flat.count_writes();
  open(unit);
  if (plan_.options.backward_prefetch == BackwardPrefetch::Before) prefetch(unit, -1);
}

// A call's nodes have been run. Gradients of all parameters are no sign of it: those of the call's
// inputs may still need the values of frozen or detached ones.
void Fsdp::State::after_backward(Unit& unit) {
  // Another call would need the parameters again.
  if (!unit.backward_open || unit.calls->running > 0 || unit.fired < unit.calls->live) return;
  const at::NoGradGuard no_grad;
  // Of the rest, which these calls did not use, there is none to come. Ranks that used it have
  // started this average before they gather the next unit.
  if (unit.missing > 0 && !plan_.shares && !whole_) complete(unit);
  unit.backward_open = false;
  close(unit, After::Free);
  if (plan_.options.backward_prefetch == BackwardPrefetch::After) prefetch(unit, -1);
}

void Fsdp::State::begin_pass() {
  in_pass_ = true;
  if (lane_plan_) begin_lane_pass();
  if (is_last_lane()) ++pass_;
  launched_ = 0;
  completed_order_.clear();
  waiting_.clear();
  const bool is_part = !plan_.shares && plan_.shards.size() < plan_.all.size();
  waits_ = lane_plan_ && is_last_lane() && is_part && !whole_;
}

void Fsdp::State::lend_memory(UnitFlat& flat) {
  if (flat.has_gradients()) return;
  at::Tensor memory = memory_->lend(flat.gradient_bytes());
  // What lanes have in flight has none of it, and ranks lend it at different places.
  while (!memory.defined() && !in_flight_.empty() && !lane_plan_) {
    finish_oldest();
    memory = memory_->lend(flat.gradient_bytes());
  }
  // Units that are not complete hold all of it: the layers did not come one after another.
  if (!memory.defined()) {
    memory = at::empty({flat.gradient_bytes()}, at::TensorOptions(at::kByte).device(flat.device()));
  }
  flat.use(memory);
}

at::Tensor Fsdp::State::arriving(size_t parameter, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  begin_backward();
  const bool held = *holds_ > 0;
  if (!held && !in_pass_) begin_pass();
  if (held && lane_plan_) object_unless_in_lane(objection_, *lane_plan_, "Fsdp");
  const auto& item = model().parameters[parameter];
  const auto& [unit, flat, member] = places_[parameter];
  if (!flat->is_trainable()) {
    object(module_.difference() + " after Fsdp was attached: construct it again, after unshard()");
    return {};
  }
  if (gradient.layout() != at::kStrided) {
    object(
        fmt::format("the gradient of parameter '{}' is sparse, which is not sharded: build the "
                    "layer with sparse = false, or train with Ddp",
                    item.name));
    return {};
  }
  if (torch::autograd::impl::post_acc_grad_hooks(item.tensor)) {
    object(
        fmt::format("parameter '{}' has a post-accumulate hook, which would see no gradient: "
                    "look at fsdp.parameters() after backward()",
                    item.name));
  }
  if (unit->reduced) {
    object(fmt::format(
        "parameter '{}' received a second gradient within one backward(), when those of its {} "
        "were averaged already: checkpoint each layer once, or run this backward() under hold() "
        "and a last one outside",
        item.name, unit->name));
    return {};
  }
  if (held && !flat->has_gradients()) {
    // Kept until the pass that averages it, however many there are.
    const auto options = at::TensorOptions(at::kByte).device(flat->device());
    flat->use(flat->device().is_cpu() ? plan_.memory_of_shards(flat->gradient_bytes(), options)
                                      : at::empty({flat->gradient_bytes()}, options));
  }
  lend_memory(*flat);
  flat->add_gradient(member, gradient);
  reached_[parameter] = true;
  if (held) guard(parameter);
  return {};
}

void Fsdp::State::arrived(size_t parameter) {
  Unit& unit = *places_[parameter].unit;
  if (!backward_.is_open() || unit.reduced || !places_[parameter].flat->is_trainable()) return;
  if (!arrived_[parameter]) --unit.missing;
  arrived_[parameter] = true;
  // Another call of the unit may still bring more.
  if (unit.missing == 0 && unit.fired >= unit.calls->live) complete(unit);
  drive();
}

void Fsdp::State::complete(Unit& unit) {
  // More than once where a module around the unit is recomputed for each of its calls.
  if (std::exchange(unit.ready, true) || !in_pass_) return;
  completed_order_.push_back(&unit);
  launch_ready();
}

void Fsdp::State::launch_ready() {
  while (launched_ < reduce_order_.size() && reduce_order_[launched_]->ready) {
    launch(*reduce_order_[launched_]);
  }
}

void Fsdp::State::launch(Unit& unit) {
  ++launched_;
  unit.reduced = true;
  for (auto& flat : unit.flats) {
    if (!flat.is_trainable()) continue;
    lend_memory(flat);
    if (!lane_plan_) {
      in_group([&] { flat.start_reduce(call(unit.name)); });
      in_flight_.push_back(&flat);
      continue;
    }
    if (is_in_lane()) flat.place_lane(*lane_plan_, lane_plan_->open);
    memory_->take_back(flat.drop_gradients());
    if (!is_last_lane()) continue;
    if (waits_) {
      waiting_.emplace_back(&flat, &unit);
    } else {
      start_lane_average(flat, unit);
    }
  }
}

void Fsdp::State::start_lane_average(UnitFlat& flat, const Unit& unit) {
  flat.start_lane_average(*lane_plan_, call(unit.name));
  in_flight_.push_back(&flat);
}

// A transport without a thread of its own progresses only in calls.
void Fsdp::State::drive() {
  const auto is_over = [&] { return in_flight_.front()->advance_reduce(); };
  while (!in_flight_.empty() && in_group(is_over)) finish_oldest();
}

void Fsdp::State::finish_oldest() {
  UnitFlat* flat = in_flight_.front();
  in_flight_.pop_front();
  in_group([&] { memory_->take_back(flat->finish_reduce()); });
}

void Fsdp::State::discount_calls() {
  for (const auto& each : fired_) {
    if (const auto call = each.lock()) call->discount();
  }
  fired_.clear();
}

void Fsdp::State::end_backward() {
  const at::NoGradGuard no_grad;
  for (const auto& unit : units_) {
    if (!unit->backward_open) continue;
    unit->backward_open = false;
    close(*unit, After::Keep);
  }
  discount_calls();
  if (!whole_) hide_unused();
  if (std::exchange(in_pass_, false)) return finish_pass();
  // A model that is frozen now has no pass whose end all ranks meet in: they do here, so that its
  // shards may be written next.
  const auto trains = [&](size_t i) { return model().parameters[i].tensor.requires_grad(); };
  if (!may_be_read_ || whole_ || *holds_ > 0 || std::ranges::any_of(trainable_, trains)) return;
  meet("backward of a frozen model");
  may_be_read_ = false;
  may_be_written_ = true;
}

// Collectives in flight still write to their units' memory; the next backward() waits for them.
// What the pass has added to the others' cannot be told from what came before it, and as it has no
// guard nor average yet, neither the module's zero_grad() nor an optimizer's would reach it.
void Fsdp::State::abandon_backward() {
  const bool was_in_pass = std::exchange(in_pass_, false);
  if (was_in_pass) {
    for (const auto& unit : units_) {
      if (unit->reduced) continue;
      for (auto& flat : unit->flats) memory_->take_back(flat.drop_gradients());
    }
    if (!is_in_lane()) std::ranges::fill(reached_, false);  // otherwise also of the lanes before
  }
  discount_calls();
  for (const auto& unit : units_) {
    if (std::exchange(unit->backward_open, false)) --unit->uses;
  }
  if (was_in_pass && !is_in_lane()) end_whole();
  may_be_written_ = true;  // by the step of gradients from before, as after any backward()
}

void Fsdp::State::finish_pass() {
  stale_ = true;
  may_be_read_ = false;
  std::string change = module_.difference();
  if (change.empty()) {
    for (const auto& unit : units_) {
      for (const auto& flat : unit->flats) {
        if (const auto name = flat.detached(model()); !name.empty() && change.empty()) {
          change = fmt::format("parameter '{}' was given other memory", name);
        }
      }
    }
  }
  if (!change.empty()) {
    object(change +
           " after Fsdp was attached: construct it again, after unshard(), and let a "
           "forward that gives parameters their first values come before it");
  }
  if (auto text = take_objection_to_writes(); !text.empty()) object(std::move(text));
  meet_before_lane_average();
  while (launched_ < reduce_order_.size()) launch(*reduce_order_[launched_]);
  while (!in_flight_.empty()) finish_oldest();
  if (lane_plan_) {
    const bool is_last = is_last_lane();
    end_lane_pass();
    if (!is_last) return;
    close_for_lanes();
  }
  // What an optimizer now writes to the shards would not reach parameters that stay.
  end_whole();

  const auto mine = told();
  flags_.write(mine);
  if (flag_counts_.buffers > 0) flags_.write_changed(buffers_->find_changed());
  flags_.clear_prior();
  flags_.clear_new_order();
  if (orders_.any()) flags_.write_new_order();
  if (buffers_->is_start_changed()) flags_.write_prior();
  if (objection_.is_raised()) flags_.write_objection();
  plan_.all.all_reduce(flags_.elements(), ReduceOp::Sum, call("flags")).wait();
  const auto any = flags_.set();
  refuse_objected(object_to_differences(mine, any));
  finish_buffers();
  wait_for_host();
  std::vector<char> reached(model().parameters.size());
  for (size_t i = 0; i < trainable_.size(); ++i) reached[trainable_[i]] = any[i];
  settle(reached);
  if (plan_.all.size() > 1 && (!ordered_ || flags_.has_new_order())) {
    compare_orders(plan_.all, fmt::format("pass {} of Fsdp {}", pass_, caller_), orders_.take());
  }
  if (!ordered_) agree_on_order();
}

// Averages over lanes are taken by all ranks: a rank that has left out a unit would wait there for
// one that gathers it in a part of them, and the other way round. So they begin when the ranks that
// gather have met; one that began before could wait, in its start, for a rank that is here.
void Fsdp::State::meet_before_lane_average() {
  if (!std::exchange(waits_, false)) return;
  in_group([&] { plan_.shards.barrier(call("end of lanes")).wait(); });
  for (const auto& [flat, unit] : std::exchange(waiting_, {})) start_lane_average(*flat, *unit);
}

std::vector<char> Fsdp::State::told() const {
  const size_t count = trainable_.size();
  std::vector<char> mine(count_flags());
  for (size_t i = 0; i < count; ++i) {
    const size_t parameter = trainable_[i];
    const at::Tensor& leaf = places_[parameter].flat->leaf(places_[parameter].member);
    mine[kReached * count + i] = reached_[parameter];
    mine[kFrozen * count + i] =
        !reached_[parameter] && !model().parameters[parameter].tensor.requires_grad();
    // An optimizer need not have been given a part without elements.
    mine[kHasPrior * count + i] = leaf.grad().defined() && leaf.numel() > 0;
    mine[kHasNoPrior * count + i] = !leaf.grad().defined();
  }
  return mine;
}

// Whether some rank objects to how the ranks' parameters differ, which all ranks see.
bool Fsdp::State::object_to_differences(const std::vector<char>& mine,
                                        const std::vector<char>& any) {
  const size_t count = trainable_.size();
  bool differs = false;
  for (size_t i = 0; i < count; ++i) {
    if (!any[kReached * count + i]) continue;
    const std::string& name = model().parameters[trainable_[i]].name;
    if (any[kFrozen * count + i]) {
      differs = true;
      if (mine[kFrozen * count + i]) object(frozen_on_one_rank(name));
    }
    if (any[kHasPrior * count + i] && any[kHasNoPrior * count + i]) {
      differs = true;
      if (mine[kHasNoPrior * count + i]) {
        object(
            fmt::format("the gradient of parameter '{}' was cleared on this rank and not on "
                        "another: clear gradients on all ranks or on none",
                        name));
      }
    }
  }
  return differs;
}

// On a device the flags cannot be read without waiting for it, which the pass does in any case: it
// has to know which parameters some rank has reached.
void Fsdp::State::refuse_objected(bool differs) {
  if (!differs && flags_.elements()[-1].item<float>() <= 0) return;
  flags_.clear_objection();
  if (lane_plan_) buffers_->abandon_lanes();
  std::ranges::fill(reached_, false);
  objection_.refuse(plan_.all, "fsdp", call("objections"));
}

void Fsdp::State::finish_buffers() {
  if (flag_counts_.buffers == 0) return;
  if (lane_plan_ && flags_.has_prior()) buffers_->check_start("fsdp");
  auto shares = flags_.changed();
  for (double& share : shares) share /= plan_.all.size();
  if (lane_plan_) return buffers_->finish_lanes(shares);
  if (std::ranges::none_of(shares, [](double share) { return share > 0; })) return;
  buffers_->warn_of_own_changes(shares);
  buffers_->start(all_ranks(plan_.all));
  buffers_->finish(shares);
}

void Fsdp::State::settle(const std::vector<char>& reached) {
  for (const auto& unit : units_) {
    for (auto& flat : unit->flats) {
      if (flat.is_trainable()) flat.settle(reached);
    }
  }
  for (const size_t i : trainable_) {
    if (reached[i]) guard(i);
  }
  std::ranges::fill(reached_, false);
}

void Fsdp::State::agree_on_order() {
  ordered_ = true;
  if (plan_.all.size() == 1) return;
  std::vector<size_t> order;
  const auto number = [&](const Unit* unit) {
    const auto found = std::ranges::find(
        units_, unit, [](const std::unique_ptr<Unit>& each) { return each.get(); });
    return static_cast<size_t>(found - units_.begin());
  };
  for (const Unit* unit : completed_order_) order.push_back(number(unit));
  for (const Unit* unit : reduce_order_) {
    if (std::ranges::find(order, number(unit)) == order.end()) order.push_back(number(unit));
  }
  const std::string bytes = plan_.all.broadcast_bytes(
      {reinterpret_cast<const char*>(order.data()), order.size() * sizeof(size_t)}, 0,
      call("order of units"));
  std::memcpy(order.data(), bytes.data(), bytes.size());
  for (size_t i = 0; i < order.size(); ++i) reduce_order_[i] = units_[order[i]].get();
}

}  // namespace lockstep::parallel

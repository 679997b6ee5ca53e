// The part of Reducer that deals with gradients between passes: accumulated, or made undefined.
#include <algorithm>
#include <utility>

#include "parallel/ddp/reducer/reducer.h"
#include "parallel/lanes/rules.h"

namespace lockstep::parallel {

std::vector<std::string> Reducer::held() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (held_[i]) names.push_back(parameters_[i].name);
  }
  return names;
}

void Reducer::keep_held(const std::vector<std::string>& names) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Named& item = parameters_[i];
    const bool is_named = std::ranges::find(names, item.name) != names.end();
    if (is_named && item.tensor.grad().defined()) held_[i] = true;
  }
}

void Reducer::zeroed() {
  if (is_in_lane()) {
    object_to_zero_grad(objection_, *plan_);
    return;
  }
  const bool drops_held = any_held();
  forget();
  if (drops_held && !accumulates_) {
    pass_ -= std::exchange(skipped_, 0);
    zeroed_ = 0;
    return;
  }
  if (zeroed_in_a_pass_ > 0 && zeroed_ > 0 && zeroed_ % zeroed_in_a_pass_ == 0) {
    ++pass_;
    ++skipped_;
  }
  ++zeroed_;
}

bool Reducer::any_held() const { return std::ranges::find(held_, 1) != held_.end(); }

// Ranks may accumulate unequally many batches, some of them one at a time: all have to count the
// same calls.
void Reducer::note_accumulation() {
  if (accumulates_ || quiet_) return;
  accumulates_ = reads_flags() ? flags_.has_held() : any_held();
  if (accumulates_ && reads_flags()) flags_.clear_held();
}

void Reducer::forget() {
  std::fill(held_.begin(), held_.end(), false);
  join_.forget_priors();
  if (lanes_ && !is_in_lane()) lanes_->reset();
  clock_.idle();
}

void Reducer::refuse_unaveraged() {
  if (zeroed_ == 0 || is_in_lane()) return;
  auto text = change();
  if (text.empty()) return;
  object(std::move(text));
  meet_without_backward();
}

}  // namespace lockstep::parallel

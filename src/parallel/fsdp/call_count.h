// How many calls of a unit may still run backward.
#pragma once

#include <memory>
#include <utility>

#include "parallel/fsdp/state.h"

namespace lockstep::parallel {

// One call of a unit in forward. The graph that it is in owns it, by the hooks on its outputs.
struct Fsdp::State::Call : std::enable_shared_from_this<Call> {
  explicit Call(std::shared_ptr<int> l) : live(std::move(l)) { count(); }
  ~Call() { discount(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void count() {
    if (!counted) ++*live;
    counted = true;
  }
  // Its backward is over, though the graph may be kept.
  void discount() {
    if (counted) --*live;
    counted = false;
    fired = false;
  }

  std::shared_ptr<int> live;
  bool counted = false;
  bool fired = false;  // in the backward that is under way
};

}  // namespace lockstep::parallel

// How many calls of a unit may still run backward, and in which of them it is under way.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "parallel/fsdp/graph_edges.h"
#include "parallel/fsdp/state.h"

namespace lockstep::parallel {

// One call of a unit in forward. The graph that it is in owns it, by the hooks on its outputs.
struct Fsdp::State::Call : EdgeListener, std::enable_shared_from_this<Call> {
  Call(std::weak_ptr<State> s, Unit& u) : state(std::move(s)), unit(&u), counts(u.calls) {
    count();
  }
  ~Call() override { discount(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void count() {
    if (!counted) ++counts->live;
    counted = true;
  }
  // Its backward is over, though the graph may be kept.
  void discount() {
    if (counted) --counts->live;
    counted = false;
    fired = false;
    leave();
  }

  // Its backward begins.
  void enter() {
    fired = true;
    reached.assign(edges, false);
    missing = edges;
    if (!running) ++counts->running;
    running = true;
  }
  // Its nodes have been run.
  void leave() {
    if (running) --counts->running;
    running = false;
  }
  void reach(size_t edge) override {
    if (!running || std::exchange(reached[edge], true) || --missing > 0) return;
    leave();
    if (const auto owner = state.lock()) owner->after_backward(*unit);
  }

  std::weak_ptr<State> state;
  Unit* unit;  // while there is the state
  std::shared_ptr<CallCounts> counts;
  size_t edges = 0;           // that are watched; 0: it is not known when its nodes have been run
  std::vector<char> reached;  // by edge
  size_t missing = 0;         // edges
  bool counted = false;
  bool fired = false;    // in the backward that is under way
  bool running = false;  // and not through
};

}  // namespace lockstep::parallel

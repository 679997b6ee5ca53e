#include "random/group/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "random/group/dice.h"

namespace lockstep::random_group {
namespace {

// What is under way at a step, for fault_in().
class Flight {
 public:
  explicit Flight(const Program& program) : program_(program) {}

  std::optional<std::string> take(const Step& step) {
    switch (step.kind) {
      case Step::Kind::Split:
        if (!knows(program_.splits[step.which].parent))
          return "a split of a group that is not there";
        groups_.insert(step.which + 1);
        return {};
      case Step::Kind::Allocate:
        if (!knows(program_.arenas[step.which].group)) return "memory of a group that is not there";
        arenas_.insert(step.which);
        return {};
      case Step::Kind::Start:
        return start(step.which);
      case Step::Kind::Wait:
        return wait(step.ops);
      case Step::Kind::Poll:
        if (!under_way_.count(step.which))
          return fmt::format("op{} is asked but not under way", step.which);
        return {};
    }
    return {};
  }

  std::optional<std::string> end() const {
    if (under_way_.empty()) return {};
    return fmt::format("op{} is never waited for", *under_way_.begin());
  }

 private:
  bool knows(int group) const { return group == 0 || groups_.count(group) > 0; }

  std::optional<std::string> hold(int op) {
    const Op& what = program_.ops[op];
    if (!knows(what.group)) return fmt::format("op{}'s group is not there", op);
    if (what.what == What::Barrier || is_bytes(what.what)) return {};
    for (const int buffer : {what.inputs[0], what.inputs[1], what.outputs[0], what.outputs[1]}) {
      if (!arenas_.count(program_.buffers[buffer].arena))
        return fmt::format("op{}'s memory is not there", op);
      const auto [holder, is_new] = holders_.try_emplace(buffer, op);
      if (!is_new && holder->second != op) {
        return fmt::format("op{} uses memory that op{} has", op, holder->second);
      }
    }
    return {};
  }

  std::optional<std::string> start(int op) {
    const Op& what = program_.ops[op];
    if (what.follows || under_way_.count(op)) return fmt::format("op{} cannot start here", op);
    if (auto fault = hold(op)) return fault;
    if (what.then >= 0) {
      if (auto fault = hold(what.then)) return fault;
    }
    if (what.what != What::Message) {
      for (const int other : under_way_) {
        const Op& before = program_.ops[other];
        if (before.group == what.group && (what.only < 0 || what.only == before.only))
          flushed_.insert(other);
      }
    }
    if (!is_bytes(what.what)) under_way_.insert(op);
    return {};
  }

  std::optional<std::string> wait(const std::vector<int>& ops) {
    for (const int op : ops) {
      const Op& what = program_.ops[op];
      if (!under_way_.erase(op)) return fmt::format("op{} is not under way", op);
      if (what.drops && !flushed_.count(op))
        return fmt::format("op{} is dropped, and no call follows", op);
      const bool alone = ops.size() == 1;
      if (!alone && (what.then >= 0 || what.group != program_.ops[ops[0]].group)) {
        return fmt::format("op{} may not be waited for in any order", op);
      }
      std::erase_if(holders_, [&](const auto& held) {
        return held.second == op || held.second == what.then;
      });
    }
    return {};
  }

  const Program& program_;
  std::set<int> groups_, arenas_, under_way_, flushed_;
  std::map<int, int> holders_;  // by buffer
};

}  // namespace

bool is_bytes(What what) {
  return what == What::AllGatherBytes || what == What::GatherBytes || what == What::BroadcastBytes;
}

bool is_reduction(What what) {
  return what == What::AllReduce || what == What::Reduce || what == What::ReduceScatter;
}

bool drops(const Program& program, int op, int rank) {
  const Op& what = program.ops[op];
  return what.drops && mixed(what.seed, 5, program.ranks[rank]) % 2 == 0;
}

std::vector<int> members(const Program& program, int group, int rank) {
  std::vector<int> result;
  if (group == 0) {
    for (int r = 0; r < program.size(); ++r) result.push_back(r);
    return result;
  }
  const Split& split = program.splits[group - 1];
  const int color = split.colors[program.ranks[rank]];
  if (color < 0) return {rank};
  for (const int r : members(program, split.parent, rank)) {
    if (split.colors[program.ranks[r]] == color) result.push_back(r);
  }
  std::stable_sort(result.begin(), result.end(), [&](int a, int b) {
    return split.keys[program.ranks[a]] < split.keys[program.ranks[b]];
  });
  return result;
}

bool takes_part(const Program& program, int op, int rank) {
  const Op& what = program.ops[op];
  if (what.only < 0 || what.group == 0) return true;
  return program.splits[what.group - 1].colors[program.ranks[rank]] == what.only;
}

std::optional<std::string> fault_in(const Program& program) {
  Flight flight(program);
  for (const Step& step : program.steps) {
    if (auto fault = flight.take(step)) return fault;
  }
  return flight.end();
}

}  // namespace lockstep::random_group

#include <algorithm>
#include <set>

#include "random/group/worlds.h"

namespace lockstep::random_group {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Without operations, and what no remaining one needs.
Program without(const Program& program, const std::set<int>& removed) {
  Program result = program;
  std::set<int> gone = removed;
  for (const int op : removed) {
    if (program.ops[op].then >= 0) gone.insert(program.ops[op].then);
  }
  for (size_t k = 0; k < result.ops.size(); ++k) {
    if (gone.count(result.ops[k].then)) result.ops[k].then = -1;
    // What is gone keeps its number, and takes no memory.
    if (!gone.count(static_cast<int>(k))) continue;
    result.ops[k].count = 0;
    result.ops[k].plain = true;
  }
  std::set<int> arenas, groups;
  for (const Step& step : result.steps) {
    if (step.kind != Step::Kind::Start || gone.count(step.which)) continue;
    for (int op = step.which; op >= 0; op = result.ops[op].then) {
      const Op& what = result.ops[op];
      groups.insert(what.group);
      for (const int buffer : memory_of(what)) arenas.insert(result.buffers[buffer].arena);
    }
  }
  for (const int arena : arenas) groups.insert(result.arenas[arena].group);
  for (auto split = static_cast<int>(result.splits.size()); split > 0; --split) {
    if (groups.count(split)) groups.insert(result.splits[split - 1].parent);
  }
  std::erase_if(result.steps, [&](Step& step) {
    switch (step.kind) {
      case Step::Kind::Split:
        return !groups.count(step.which + 1);
      case Step::Kind::Allocate:
        return !arenas.count(step.which);
      case Step::Kind::Wait:
        std::erase_if(step.ops, [&](int op) { return gone.count(op) > 0; });
        return step.ops.empty();
      default:
        return gone.count(step.which) > 0;
    }
  });
  return result;
}

class Shrinker {
 public:
  Shrinker(const Setting& setting, milliseconds deadline, milliseconds budget)
      : setting_(setting), deadline_(deadline), end_(steady_clock::now() + budget) {}

  std::optional<Shrunk> from(const Program& program) {
    best_.program = program;
    if (!fails(program)) return {};
    // What hangs is told from what is slow with the whole deadline once more, at the end.
    const milliseconds whole = deadline_;
    if (best_.failure.late) deadline_ = std::min(deadline_, milliseconds(4000));
    const Program first = best_.program;
    while (pass() && steady_clock::now() < end_) {
    }
    if (deadline_ == whole) return best_;
    deadline_ = whole;
    if (fails(Program(best_.program))) return best_;
    best_.program = first;
    if (fails(first)) return best_;
    return {};
  }

 private:
  // Takes the candidate if it fails, too.
  bool fails(const Program& candidate) {
    if (steady_clock::now() > end_ || fault_in(candidate)) return false;
    ++best_.attempts;
    const auto failure = run_in_world(setting_, {candidate}, deadline_);
    if (!failure) return false;
    best_.program = candidate;
    best_.failure = *failure;
    return true;
  }

  template <class Change>
  bool changed(const Change& change) {
    Program candidate = best_.program;
    change(candidate);
    return fails(candidate);
  }

  std::vector<int> ops_left() const {
    std::vector<int> ops;
    for (const Step& step : best_.program.steps) {
      if (step.kind == Step::Kind::Start) ops.push_back(step.which);
    }
    return ops;
  }

  bool pass() {
    return drop_ops() | drop_ranks() | drop_steps() | simplify_ops() | simplify_arenas();
  }

  bool drop_ops() {
    bool any = false;
    for (size_t many = std::max<size_t>(1, ops_left().size() / 2); many > 0; many /= 2) {
      for (size_t at = 0; at < ops_left().size();) {
        const std::vector<int> left = ops_left();
        const std::set<int> removed(left.begin() + at,
                                    left.begin() + std::min(left.size(), at + many));
        if (fails(without(best_.program, removed))) {
          any = true;
        } else {
          at += many;
        }
      }
    }
    for (const int op : ops_left()) {
      if (best_.program.ops[op].then >= 0 &&
          fails(without(best_.program, {best_.program.ops[op].then})))
        any = true;
    }
    return any;
  }

  bool drop_ranks() {
    bool any = false;
    for (int rank = best_.program.size() - 1; rank >= 0 && best_.program.size() > 1; --rank) {
      any |= changed([&](Program& program) { program.ranks.erase(program.ranks.begin() + rank); });
    }
    return any;
  }

  bool drop_steps() {
    bool any = false;
    for (size_t at = best_.program.steps.size(); at-- > 0;) {
      if (at >= best_.program.steps.size()) continue;
      const Step& step = best_.program.steps[at];
      if (step.kind == Step::Kind::Poll) {
        any |= changed([&](Program& program) { program.steps.erase(program.steps.begin() + at); });
      } else if (step.kind == Step::Kind::Wait && step.ops.size() > 1) {
        any |= changed([&](Program& program) {
          std::vector<Step> singly;
          for (const int op : step.ops) singly.push_back({.kind = Step::Kind::Wait, .ops = {op}});
          program.steps.erase(program.steps.begin() + at);
          program.steps.insert(program.steps.begin() + at, singly.begin(), singly.end());
        });
      }
    }
    return any;
  }

  // Sets a field of an operation, if it is not so already and still fails.
  template <class T>
  bool set(int op, T Op::*field, T value) {
    if (best_.program.ops[op].*field == value) return false;
    return changed([&](Program& program) { program.ops[op].*field = value; });
  }

  bool simplify_ops() {
    std::vector<int> ops = ops_left();
    for (const int op : ops_left()) {
      if (best_.program.ops[op].then >= 0) ops.push_back(best_.program.ops[op].then);
    }
    bool any = false;
    for (const int op : ops) {
      const Op before = best_.program.ops[op];
      for (bool Op::*field : {&Op::drops, &Op::late, &Op::polls, &Op::labelled, &Op::refused,
                              &Op::in_place, &Op::fill, &Op::list, &Op::twice, &Op::overlaps}) {
        any |= set(op, field, false);
      }
      any |= set(op, &Op::plain, true) | set(op, &Op::small, true) | set(op, &Op::only, -1) |
             set(op, &Op::group, 0);
      any |= set(op, &Op::root, 0) | set(op, &Op::op, comm::ReduceOp::Sum);
      any |= set(op, &Op::divide_by, 0);
      any |= changed_buffers(op);
      for (const int64_t count :
           {int64_t{0}, int64_t{1}, int64_t{2}, before.count / 16, before.count / 2}) {
        if (count >= best_.program.ops[op].count) continue;
        if (!set(op, &Op::count, count)) continue;
        any = true;
        break;
      }
    }
    return any;
  }

  bool changed_buffers(int op) {
    const Op& what = best_.program.ops[op];
    if (what.inputs[0] == what.inputs[1] && what.outputs[0] == what.outputs[1] &&
        what.others[0] < 0)
      return false;
    return changed([&](Program& program) {
      program.ops[op].inputs[1] = program.ops[op].inputs[0];
      program.ops[op].outputs[1] = program.ops[op].outputs[0];
      program.ops[op].others[0] = program.ops[op].others[1] = -1;
    });
  }

  bool simplify_arenas() {
    bool any = false;
    std::vector<int> arenas;
    for (const Step& step : best_.program.steps) {
      if (step.kind == Step::Kind::Allocate) arenas.push_back(step.which);
    }
    for (const int arena : arenas) {
      if (best_.program.arenas[arena].kind == Arena::Kind::Private) continue;
      any |= changed([&](Program& program) { program.arenas[arena].kind = Arena::Kind::Private; });
    }
    // Splits and memory that nothing needs any more.
    const Program tidy = without(best_.program, {});
    if (tidy.steps.size() < best_.program.steps.size()) any |= fails(tidy);
    return any;
  }

  const Setting setting_;
  milliseconds deadline_;
  const steady_clock::time_point end_;
  Shrunk best_;
};

}  // namespace

std::optional<Shrunk> shrink(const Setting& setting, const Program& program, milliseconds deadline,
                             milliseconds budget) {
  return Shrinker(setting, deadline, budget).from(program);
}

}  // namespace lockstep::random_group

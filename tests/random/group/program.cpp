#include "random/group/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "random/common/dice.h"

namespace lockstep::random_group {
namespace {

// What is under way at a step, for fault_in().
class Flight {
 public:
  explicit Flight(const Program& program) : program_(program) {}

  std::optional<std::string> take(const Step& step) {
    if (chain_ >= 0 && step.kind != Step::Kind::Poll) {
      if (auto fault = follow_chain(step)) return fault;
    }
    if (auto fault = follow_loose(step)) return fault;
    switch (step.kind) {
      case Step::Kind::Split:
        if (!knows(program_.splits[step.which].parent))
          return "a split of a group that is not there";
        groups_.insert(step.which + 1);
        return leaves_dropped({.group = program_.splits[step.which].parent, .drops = true});
      case Step::Kind::Allocate:
        if (!knows(program_.arenas[step.which].group)) return "memory of a group that is not there";
        arenas_.insert(step.which);
        return {};
      case Step::Kind::Start:
        return start(step.which);
      case Step::Kind::Wait:
        return wait(step);
      case Step::Kind::Poll:
        if (under_way_.count(step.which)) return {};
        return fmt::format("op{} is asked but not under way", step.which);
    }
    return {};
  }

  std::optional<std::string> end() const {
    if (!under_way_.empty()) return fmt::format("op{} is never waited for", *under_way_.begin());
    if (!loose_.empty())
      return fmt::format("op{} is dropped, and nothing finishes it", *loose_.begin());
    return {};
  }

 private:
  bool knows(int group) const { return group == 0 || groups_.count(group) > 0; }

  // A dropped then() goes on in the next call on its group, or in the next wait: the others wait
  // for it just there.
  std::optional<std::string> follow_chain(const Step& step) {
    const std::string fault = fmt::format("op{} is dropped and not gone on with at once", chain_);
    const Op& chain = program_.ops[chain_];
    const bool waits = step.kind == Step::Kind::Wait && step.ops.size() == 1;
    if (under_way_.count(chain_)) {
      if (waits && (step.ops[0] == chain_ || finishes(program_.ops[step.ops[0]], chain))) return {};
      return fault;
    }
    if (loose_.count(chain_) &&
        (step.kind != Step::Kind::Start || !finishes(program_.ops[step.which], chain))) {
      return fault;
    }
    chain_ = -1;
    return {};
  }

  // Ranks that have waited for what others have dropped are in its group until a call there is
  // waited for: the others may wait nowhere else meanwhile.
  std::optional<std::string> follow_loose(const Step& step) const {
    if (step.kind == Step::Kind::Poll) return {};
    for (const int op : loose_) {
      const bool follows =
          (step.kind == Step::Kind::Start &&
           finishes(program_.ops[step.which], program_.ops[op])) ||
          (step.kind == Step::Kind::Wait && finishes(program_.ops[step.ops[0]], program_.ops[op]));
      if (!follows) return fmt::format("op{} is dropped, and only some ranks have waited", op);
    }
    return {};
  }

  std::optional<std::string> hold(int op) {
    const Op& what = program_.ops[op];
    if (!knows(what.group)) return fmt::format("op{}'s group is not there", op);
    for (const int buffer : memory_of(what)) {
      if (!arenas_.count(program_.buffers[buffer].arena)) {
        return fmt::format("op{}'s memory is not there", op);
      }
      const auto [holder, is_new] = holders_.try_emplace(buffer, op);
      if (is_new || holder->second == op) continue;
      const Op& before = program_.ops[holder->second];
      // A call on memory of a dropped operation finishes that first.
      if (loose_.count(holder->second) && before.then < 0 && finishes(what, before) && !what.fill) {
        holder->second = op;
        continue;
      }
      return fmt::format("op{} uses memory that op{} has", op, holder->second);
    }
    return {};
  }

  std::optional<std::string> start(int op) {
    const Op& what = program_.ops[op];
    if (what.follows || under_way_.count(op)) return fmt::format("op{} cannot start here", op);
    if (auto fault = hold(op)) return fault;
    if (what.then >= 0) {
      if (auto fault = hold(what.then)) return fault;
      if (what.drops) chain_ = op;
    }
    if (is_bytes(what.what)) {
      finish_dropped(what);
    } else {
      under_way_.insert(op);
    }
    return {};
  }

  // Whoever waits for anything of a group waits for what it has dropped there, too, which the
  // others do not know.
  std::optional<std::string> leaves_dropped(const Op& waited) const {
    for (const int op : under_way_) {
      const Op& what = program_.ops[op];
      if (what.drops && what.group == waited.group && !finishes(waited, what)) {
        return fmt::format("op{} is dropped, and only some ranks finish it", op);
      }
    }
    return {};
  }

  void finish_dropped(const Op& what) {
    for (const int op : under_way_) {
      if (program_.ops[op].drops && finishes(what, program_.ops[op])) finished_.insert(op);
    }
    for (auto op = loose_.begin(); op != loose_.end();) {
      if (finishes(what, program_.ops[*op])) {
        release(*op);
        op = loose_.erase(op);
      } else {
        ++op;
      }
    }
  }

  void release(int op) {
    std::erase_if(holders_, [&](const auto& held) {
      return held.second == op || held.second == program_.ops[op].then;
    });
  }

  std::optional<std::string> wait(const Step& step) {
    for (const int op : step.ops) {
      const Op& what = program_.ops[op];
      if (!under_way_.erase(op)) return fmt::format("op{} is not under way", op);
      const bool alone = step.ops.size() == 1;
      if (!alone &&
          (what.then >= 0 || what.drops || what.group != program_.ops[step.ops[0]].group)) {
        return fmt::format("op{} may not be waited for in any order", op);
      }
      if (what.drops && !step.settled) {
        loose_.insert(op);
        continue;
      }
      if (what.drops && !finished_.count(op))
        return fmt::format("op{} is dropped, and nothing finishes it", op);
      release(op);
    }
    for (const int op : step.ops) finish_dropped(program_.ops[op]);
    if (step.settled) return {};
    for (const int op : step.ops) {
      if (auto fault = leaves_dropped(program_.ops[op])) return fault;
      const int next = program_.ops[op].then;
      if (next >= 0 && program_.ops[op].group != program_.ops[next].group) {
        if (auto fault = leaves_dropped({.group = program_.ops[next].group, .drops = true}))
          return fault;
      }
    }
    return {};
  }

  const Program& program_;
  std::set<int> groups_, arenas_, under_way_;
  std::set<int> finished_;      // dropped, and under way on ranks that did not drop it
  std::set<int> loose_;         // the reverse
  int chain_ = -1;              // a then() that was dropped
  std::map<int, int> holders_;  // by buffer
};

}  // namespace

bool is_bytes(What what) {
  return what == What::AllGatherBytes || what == What::GatherBytes || what == What::BroadcastBytes;
}

bool is_reduction(What what) {
  return what == What::AllReduce || what == What::Reduce || what == What::ReduceScatter ||
         what == What::AllReduces || what == What::ReduceScatters;
}

bool is_several(What what) {
  return what == What::AllReduces || what == What::Broadcasts || what == What::AllGathers ||
         what == What::ReduceScatters;
}

bool is_in_place(What what) {
  return what == What::AllReduce || what == What::Reduce || what == What::Broadcast ||
         what == What::AllReduces || what == What::Broadcasts;
}

int tensors_of(const Op& op) {
  return is_several(op.what) ? static_cast<int>(1 + mixed(op.seed, 20) % 5) : 1;
}

double factor_of(const Op& op, int name) {
  constexpr double kFactors[] = {-1.5, 0.5, 2, 1, -0.375};
  return kFactors[mixed(op.seed, 13, static_cast<uint64_t>(name)) % 5];
}

std::vector<int> memory_of(const Op& op) {
  if (op.what == What::Barrier || is_bytes(op.what)) return {};
  std::vector<int> all{op.inputs[0], op.inputs[1], op.outputs[0], op.outputs[1]};
  if (op.others[0] >= 0) all.insert(all.end(), {op.others[0], op.others[1]});
  return all;
}

bool finishes(const Op& op, const Op& dropped) {
  return !op.drops && op.what != What::Message && op.group == dropped.group &&
         (op.only < 0 || op.only == dropped.only);
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

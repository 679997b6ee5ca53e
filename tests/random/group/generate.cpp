#include <algorithm>
#include <map>
#include <set>

#include "random/common/dice.h"
#include "random/group/program.h"

namespace lockstep::random_group {
namespace {

using c10::ScalarType;
using comm::ReduceOp;

const std::vector<ScalarType> kDtypes = {c10::kFloat, c10::kDouble, c10::kHalf, c10::kBFloat16,
                                         c10::kChar,  c10::kShort,  c10::kInt,  c10::kLong,
                                         c10::kByte,  c10::kBool};
// Of which Python's Gloo has none, and which NCCL rounds otherwise.
const std::vector<ScalarType> kRareDtypes = {
    c10::kUInt16,      c10::kUInt32,       c10::kUInt64,       c10::kFloat8_e4m3fn,
    c10::kFloat8_e5m2, c10::kComplexFloat, c10::kComplexDouble};
const std::vector<What> kCalls = {
    What::AllReduce,     What::AllReduce,     What::AllReduce,      What::Reduce,
    What::ReduceScatter, What::ReduceScatter, What::AllGather,      What::AllGather,
    What::Broadcast,     What::Broadcast,     What::Gather,         What::Scatter,
    What::AllToAll,      What::AllToAll,      What::Message,        What::Message,
    What::Message,       What::Barrier,       What::Message,        What::AllReduce,
    What::Reduce,        What::GatherBytes,   What::AllGatherBytes, What::BroadcastBytes,
    What::SendRecv,      What::SendRecv,      What::AllReduces,     What::AllReduces,
    What::Broadcasts,    What::AllGathers,    What::ReduceScatters};

// Buffers of one dtype that a program has, so that several operations are under way at a time.
constexpr int kBuffers = 12;  // an operation and the one after it may have six each
constexpr size_t kMostUnderWay = 12;

class Writer {
 public:
  Writer(uint64_t seed, int ranks, const Traits& traits) : dice_(seed), traits_(traits) {
    program_.seed = seed;
    for (int r = 0; r < ranks; ++r) program_.ranks.push_back(r);
  }

  Program write() {
    make_splits();
    make_memory();
    for (int64_t left = 3 + dice_.below(12); left > 0; --left) {
      while (dice_.one_in(3) && !under_way_.empty()) wait_for_some();
      if (under_way_.size() >= kMostUnderWay) wait_for_some();
      if (dice_.one_in(4)) poll();
      add_op();
    }
    for (int group = 0; group <= static_cast<int>(program_.splits.size()); ++group) {
      if (has_dropped(group)) barrier(group);
    }
    while (!under_way_.empty()) wait_for_some();
    return std::move(program_);
  }

 private:
  void make_splits() {
    if (program_.size() == 1 || !traits_.splits) return;
    for (int64_t left = dice_.below(3); left > 0; --left) {
      Split split;
      split.parent =
          static_cast<int>(dice_.below(static_cast<int64_t>(program_.splits.size()) + 1));
      const int64_t style = dice_.below(5);
      for (int r = 0; r < program_.size(); ++r) {
        const int64_t color = style == 0   ? 0
                              : style == 1 ? r % 2
                              : style == 2 ? (r < program_.size() / 2 ? 0 : 1)
                                           : dice_.below(4) - (style == 3 ? 1 : 0);
        split.colors.push_back(static_cast<int>(color));
        split.keys.push_back(static_cast<int>(dice_.below(3) - 1));
      }
      split.lists = dice_.one_in(3);
      for (int& color : split.colors) {
        if (split.lists && color > 0) color = -1;
      }
      program_.splits.push_back(split);
    }
  }

  void make_memory() {
    for (int64_t left = 1 + dice_.below(3); left > 0; --left) {
      const ScalarType dtype =
          dice_.pick(traits_.tree_order && dice_.one_in(3) ? kRareDtypes : kDtypes);
      for (int made = 0; made < kBuffers;) {
        Arena arena{.dtype = dtype, .seed = dice_.next()};
        arena.kind = dice_.pick<Arena::Kind>({Arena::Kind::Private, Arena::Kind::Private,
                                              Arena::Kind::OfGroup, Arena::Kind::OfGroup,
                                              Arena::Kind::Shared});
        arena.group =
            static_cast<int>(dice_.below(static_cast<int64_t>(program_.splits.size()) + 1));
        for (int64_t more = 1 + dice_.below(4); more > 0; --more, ++made) {
          program_.buffers.push_back({static_cast<int>(program_.arenas.size())});
        }
        program_.arenas.push_back(arena);
      }
    }
  }

  int64_t random_count(What what) {
    const int64_t style = dice_.below(40);
    if (style < 5) return 0;
    if (style < 12) return 1;
    if (style < 32) return 2 + dice_.below(20);
    if (style < 38) return dice_.below(3000);
    const bool one = what == What::AllReduce || what == What::Reduce || what == What::Broadcast ||
                     what == What::Message;
    return dice_.below(one ? 70000 : 20000);
  }

  std::vector<ReduceOp> reductions(ScalarType dtype) const {
    if (c10::isComplexType(dtype))
      return {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product, ReduceOp::PreMulSum};
    std::vector<ReduceOp> ops = {ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max};
    // A product of many small numbers is no longer exact in every order.
    if (traits_.tree_order) ops.push_back(ReduceOp::Product);
    if (dtype != c10::kBool) ops.push_back(ReduceOp::Average);
    if (traits_.tree_order && c10::isFloatingType(dtype)) ops.push_back(ReduceOp::PreMulSum);
    if (!c10::isFloatingType(dtype) && traits_.bitwise) {
      ops.push_back(ReduceOp::BitwiseAnd);
      ops.push_back(ReduceOp::BitwiseOr);
      if (traits_.tree_order) ops.push_back(ReduceOp::BitwiseXor);
    }
    return ops;
  }

  // A buffer of the dtype that no operation has; makes room if there is none.
  int free_buffer(ScalarType dtype, const std::set<int>& taken) {
    for (;;) {
      std::vector<int> free;
      for (int b = 0; b < static_cast<int>(program_.buffers.size()); ++b) {
        if (program_.arenas[program_.buffers[b].arena].dtype == dtype && !held_.count(b) &&
            !taken.count(b))
          free.push_back(b);
      }
      if (!free.empty()) return dice_.pick(free);
      wait_for_some();
    }
  }

  Op random_op() {
    Op op{.seed = dice_.next()};
    op.what = dice_.pick(kCalls);
    op.group = static_cast<int>(dice_.below(static_cast<int64_t>(program_.splits.size()) + 1));
    if (op.group > 0 && dice_.one_in(4)) op.only = static_cast<int>(dice_.below(3));
    const ScalarType dtype = dice_.pick(program_.arenas).dtype;
    op.op = dice_.pick(reductions(dtype));
    op.root = static_cast<int>(dice_.below(program_.size()));
    op.to = static_cast<int>(dice_.below(program_.size()));
    op.count = random_count(op.what);
    op.list = dice_.one_in(2);
    op.plain = dice_.one_in(3);
    op.in_place = dice_.one_in(4);
    op.fill = !traits_.tree_order || dice_.one_in(2);
    op.small = !traits_.tree_order || dice_.one_in(3);
    op.drops = traits_.drops && dice_.one_in(5);
    op.late = dice_.one_in(2);
    op.polls = traits_.polls && dice_.one_in(4);
    op.labelled = dice_.one_in(4);
    op.refused = dice_.one_in(8);
    op.twice = dice_.one_in(4);
    op.overlaps = dice_.one_in(5);
    if (traits_.tree_order && dice_.one_in(3)) op.divide_by = static_cast<int>(1 + dice_.below(9));
    std::set<int> taken = chosen_;
    const auto choose = [&](int(&pair)[2]) {
      pair[0] = free_buffer(dtype, taken);
      taken.insert(pair[0]);
      pair[1] = pair[0];
      if (!dice_.one_in(3)) return;
      pair[1] = free_buffer(dtype, taken);
      taken.insert(pair[1]);
    };
    if (op.what == What::Barrier || is_bytes(op.what)) return op;
    choose(op.inputs);
    choose(op.outputs);
    const ScalarType other = dice_.pick(program_.arenas).dtype;
    if (is_several(op.what) && dice_.one_in(2)) {
      const auto both = reductions(other);
      if (std::ranges::count(both, op.op) == 0) op.op = ReduceOp::Sum;
      for (int& buffer : op.others) taken.insert(buffer = free_buffer(other, taken));
    }
    chosen_ = taken;
    return op;
  }

  void add_op() {
    chosen_.clear();
    Op op = random_op();
    std::optional<Op> next;
    if (!is_bytes(op.what) && dice_.one_in(8)) {
      next = random_op();
      if (is_bytes(next->what)) next.reset();
    }
    // Waiting for room may have taken time: what was chosen first is still free, since only more
    // became so.
    prepare(op);
    if (next) {
      prepare(*next);
      next->follows = true;
      next->drops = next->polls = op.polls = op.drops = false;
      if (op.drops) finish_all_dropped(next->group);
    }
    if (is_bytes(op.what) || (next && op.drops)) finish_all_dropped(op.group);
    if (next) {
      op.then = static_cast<int>(program_.ops.size()) + 1;
      hold(*next, op.then - 1);
    }
    const int index = start(op);
    if (!next) return;
    program_.ops.push_back(*next);
    if (op.drops) go_on_with(index);
  }

  // The operation's group and memory are there.
  void prepare(const Op& op) {
    split(op.group);
    for (const int buffer : memory_of(op)) allocate(program_.buffers[buffer].arena);
  }

  void hold(const Op& op, int holder) {
    for (const int buffer : memory_of(op)) held_[buffer] = holder;
  }

  void split(int group) {
    if (group == 0 || !split_.insert(group).second) return;
    split(program_.splits[group - 1].parent);
    finish_all_dropped(program_.splits[group - 1].parent);
    program_.steps.push_back({.kind = Step::Kind::Split, .which = group - 1});
  }

  void allocate(int arena) {
    if (!allocated_.insert(arena).second) return;
    split(program_.arenas[arena].group);
    program_.steps.push_back({.kind = Step::Kind::Allocate, .which = arena});
  }

  int start(const Op& op) {
    const int index = static_cast<int>(program_.ops.size());
    hold(op, index);
    program_.ops.push_back(op);
    program_.steps.push_back({.kind = Step::Kind::Start, .which = index});
    if (is_bytes(op.what)) {
      finish_dropped(Op(op));
    } else {
      under_way_.push_back(index);
    }
    return index;
  }

  void barrier(int group) {
    wait({start({.what = What::Barrier, .group = group, .seed = dice_.next()})});
  }

  // What was dropped with a then() goes on in the next wait, or in the next call on its group.
  void go_on_with(int chain) {
    const Op op = program_.ops[chain];
    for (const int other : under_way_) {
      const Op& what = program_.ops[other];
      if (other != chain && what.then < 0 && finishes(what, op) && dice_.one_in(2))
        return wait({other});
    }
    std::erase(under_way_, chain);
    program_.steps.push_back({.kind = Step::Kind::Wait, .ops = {chain}});
    barrier(op.group);
    std::erase_if(held_, [&](const auto& held) { return held.second == chain; });
  }

  // Whoever waits for anything of a group waits for what it has dropped there, too: so the others
  // have to, at that place.
  void finish_all_dropped(int group) {
    if (has_dropped(group)) barrier(group);
  }

  bool has_dropped(int group) const {
    return std::any_of(under_way_.begin(), under_way_.end(), [&](int op) {
      return program_.ops[op].drops && program_.ops[op].group == group;
    });
  }

  void release(int op) {
    std::erase(under_way_, op);
    std::erase_if(held_, [&](const auto& held) { return held.second == op; });
  }

  void wait(const std::vector<int>& ops) {
    for (const int op : ops) release(op);
    program_.steps.push_back({.kind = Step::Kind::Wait, .ops = ops, .seed = dice_.next()});
    for (const int op : ops) finish_dropped(program_.ops[op]);
  }

  // Whoever dropped something has waited for it when this is over, so the others wait here, too.
  void finish_dropped(const Op& op) {
    std::vector<int> dropped;
    for (const int other : under_way_) {
      if (program_.ops[other].drops && finishes(op, program_.ops[other])) dropped.push_back(other);
    }
    // The latest first: that is the then(), if there is one, whose other half comes at once.
    std::reverse(dropped.begin(), dropped.end());
    for (const int other : dropped) {
      release(other);
      program_.steps.push_back({.kind = Step::Kind::Wait, .ops = {other}, .settled = true});
    }
  }

  // Waits for one operation, or for some of its group in any order.
  void wait_for_some() {
    const int first = dice_.pick(under_way_);
    const Op op = program_.ops[first];
    if (op.drops) {
      if (op.then < 0 && traits_.tree_order && dice_.one_in(2)) return use_memory_of(first);
      return barrier(op.group);
    }
    if (has_dropped(op.group)) return barrier(op.group);
    if (op.then >= 0) finish_all_dropped(program_.ops[op.then].group);
    std::vector<int> ops{first};
    if (op.then < 0 && traits_.any_order && dice_.one_in(2)) {
      for (const int other : under_way_) {
        const Op& what = program_.ops[other];
        const bool fits = what.group == op.group && what.then < 0 && !what.drops;
        if (other != first && fits && !dice_.one_in(3)) ops.push_back(other);
      }
    }
    wait(ops);
  }

  // The others wait for what was dropped; then a call on its memory finishes it everywhere.
  void use_memory_of(int dropped) {
    const Op before = program_.ops[dropped];
    if (before.what == What::Barrier) return barrier(before.group);
    Op op = before;
    op.seed = dice_.next();
    op.what = dice_.pick<What>(
        {What::AllReduce, What::Broadcast, What::AllGather, What::ReduceScatter, What::AllToAll});
    op.op = dice_.pick(reductions(program_.arenas[program_.buffers[op.inputs[0]].arena].dtype));
    if (dice_.one_in(2)) std::swap(op.inputs, op.outputs);
    op.drops = op.fill = false;
    std::erase(under_way_, dropped);
    if (has_dropped(op.group)) {
      under_way_.push_back(dropped);
      return barrier(op.group);
    }
    program_.steps.push_back({.kind = Step::Kind::Wait, .ops = {dropped}});
    // Where it reads and writes nothing of what was dropped, as an empty tensor, only its wait
    // does.
    wait({start(op)});
  }

  void poll() {
    if (under_way_.empty()) return;
    program_.steps.push_back({.kind = Step::Kind::Poll, .which = dice_.pick(under_way_)});
  }

  Program program_;
  Dice dice_;
  const Traits traits_;
  std::vector<int> under_way_;
  std::map<int, int> held_;  // by buffer: the operation that has it
  std::set<int> chosen_, allocated_, split_;
};

}  // namespace

Program generate(uint64_t seed, int ranks, const Traits& traits) {
  return Writer(seed, ranks, traits).write();
}

}  // namespace lockstep::random_group

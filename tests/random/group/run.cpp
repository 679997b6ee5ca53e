#include "random/group/run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "lockstep/core/error.h"
#include "random/common/dice.h"
#include "random/group/reference.h"

namespace lockstep::random_group {
namespace {

using comm::CallOptions;
using comm::Work;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// What a rank of a bytes collective says.
std::string saying(const Program& program, const Op& op, int rank) {
  Dice dice(mixed(op.seed, 6, program.ranks[rank]));
  std::string text(dice.one_in(4) ? 0 : dice.below(op.count + 1), ' ');
  for (char& letter : text) letter = static_cast<char>(dice.next());
  return text;
}

class Runner {
 public:
  Runner(const Group& group, at::Device device, const Program& program, milliseconds deadline)
      : program_(program),
        plan_(program),
        reference_(program, plan_),
        rank_(group.rank()),
        device_(device),
        deadline_(deadline),
        groups_(program.splits.size() + 1),
        arenas_(program.arenas.size()),
        whole_(program.arenas.size()),
        works_(program.ops.size()) {
    groups_[0] = group;
  }

  void run() {
    for (at_ = 0; at_ < program_.steps.size(); ++at_) take(program_.steps[at_]);
    check_all();
  }

 private:
  // By this rank's own hash.
  bool chance(const Op& op, uint64_t what) const {
    return mixed(op.seed, what, program_.ranks[rank_]) % 2 == 0;
  }

  void take(const Step& step) {
    switch (step.kind) {
      case Step::Kind::Split: {
        const Split& split = program_.splits[step.which];
        const int name = program_.ranks[rank_];
        const Group& parent = groups_[split.parent];
        groups_[step.which + 1] = split.lists ? parent.subgroup(list_of(step.which))
                                              : parent.split(split.colors[name], split.keys[name]);
        break;
      }
      case Step::Kind::Allocate:
        allocate(step.which);
        break;
      case Step::Kind::Start:
        reference_.run(step.which);
        if (starts_late(step.which)) {
          late_ = step.which;
          break;
        }
        start_step(step.which);
        if (late_) start_step(*std::exchange(late_, std::nullopt));
        break;
      case Step::Kind::Wait:
        wait(step);
        break;
      case Step::Kind::Poll:
        (void)works_[step.which].is_completed();
        if (const auto failure = groups_[program_.ops[step.which].group].failure())
          throw Difference("the group says that it has failed: " + *failure);
        break;
    }
  }

  // For subgroup(): the ranks of its parent that a split takes, in the new group's order.
  std::vector<int> list_of(int index) const {
    const Split& split = program_.splits[index];
    const std::vector<int> all = members(program_, split.parent, rank_);
    std::vector<int> list;
    for (size_t r = 0; r < all.size(); ++r) {
      if (split.colors[program_.ranks[all[r]]] == 0) list.push_back(static_cast<int>(r));
    }
    std::ranges::stable_sort(
        list, {}, [&](int r) { return split.keys[program_.ranks[all[static_cast<size_t>(r)]]]; });
    return list;
  }

  void start_step(int op) {
    const int next = program_.ops[op].then;
    Work work = start(op);
    if (next >= 0) work = comm::then(std::move(work), [this, next] { return start(next); });
    if (!drops(program_, op, rank_)) works_[op] = std::move(work);
  }

  // Messages and collectives may be started in different orders.
  bool starts_late(int op) const {
    const Op& what = program_.ops[op];
    if (!what.late || what.what != What::Message || what.drops || what.then >= 0 || late_ ||
        !chance(what, 12))
      return false;
    if (at_ + 1 == program_.steps.size()) return false;
    const Step& next = program_.steps[at_ + 1];
    if (next.kind != Step::Kind::Start) return false;
    const Op& other = program_.ops[next.which];
    // Those between the same two ranks keep their order.
    return other.what != What::Message && other.what != What::SendRecv && !is_bytes(other.what) &&
           other.then < 0 && !other.drops;
  }

  void allocate(int index) {
    const Arena& arena = program_.arenas[index];
    const Group& group = groups_[arena.group];
    const int64_t size = plan_.arena_sizes[index];
    const at::TensorOptions options = at::TensorOptions(arena.dtype);
    at::Tensor& memory = arenas_[index];
    if (arena.kind == Arena::Kind::OfGroup) memory = group.empty({size}, options.device(device_));
    if (arena.kind == Arena::Kind::Shared) {
      whole_[index] = group.shared({size * group.size()}, options);
      if (whole_[index].defined()) memory = whole_[index].narrow(0, size * group.rank(), size);
    }
    if (!memory.defined()) memory = at::zeros({size}, options.device(device_));
    // Neighbours in shared memory are not written before all have it, and nobody else writes this
    // part.
    put(index, 0, reference_.memory(index, rank_).data(), size);
  }

  void put(int arena, int64_t begin, const char* bytes, int64_t count) {
    if (count == 0) return;
    const at::Tensor source = at::from_blob(const_cast<char*>(bytes), {count},
                                            at::TensorOptions(program_.arenas[arena].dtype));
    arenas_[arena].narrow(0, begin, count).copy_(source);
  }

  at::Tensor tensor_of(const View& view) const {
    const at::Tensor& arena = arenas_[view.arena];
    return arena.as_strided(view.sizes, view.strides, arena.storage_offset() + view.offset);
  }

  std::vector<at::Tensor> tensors_of(const std::vector<View>& views) const {
    std::vector<at::Tensor> tensors;
    for (const View& view : views) tensors.push_back(tensor_of(view));
    return tensors;
  }

  void refill(int op) {
    for (const int buffer : buffers_of(plan_, op, rank_)) {
      const int arena = program_.buffers[buffer].arena;
      const auto& place = plan_.buffers[buffer];
      std::vector<char> bytes(place.count *
                              static_cast<int64_t>(c10::elementSize(program_.arenas[arena].dtype)));
      fill(bytes.data(), program_.arenas[arena].dtype, filling_of(program_, op, buffer, rank_),
           place.count);
      put(arena, place.begin, bytes.data(), place.count);
    }
  }

  // Calls that leave the group as it was.
  void be_refused(const Group& group, uint64_t which) {
    const at::Tensor some = at::zeros({3 * group.size() + 1});
    const int beyond = group.size();
    try {
      switch (which % 7) {
        case 0:
          group.all_reduce(at::zeros({1}).expand({3})).wait();
          break;
        case 1:
          group.all_reduce(some, comm::ReduceOp::Sum, {.divide_by = 3}).wait();
          break;
        case 2:
          group.broadcast(some, beyond).wait();
          break;
        case 3:
          group.reduce_scatter(at::zeros({2}), some).wait();
          break;
        case 4:
          group.all_reduce(std::vector{some, some.narrow(0, 0, 2).expand({2, 2})}).wait();
          break;
        case 5:
          group.send_recv(at::zeros({2}), some, {.to = group.rank(), .from = beyond}).wait();
          break;
        default:
          group.all_gather(std::vector{some, some}, std::vector{some.narrow(0, 0, 1)}).wait();
      }
    } catch (const ConfigError&) {
      return;
    }
    throw Difference(fmt::format("call {} was not refused", which % 7));
  }

  Work start(int index) {
    if (!plan_.calls[index][rank_]) return {};
    const Op& op = program_.ops[index];
    const Call& call = *plan_.calls[index][rank_];
    const Group& group = groups_[op.group];
    if (op.refused && chance(op, 7)) be_refused(group, op.seed);
    if (op.fill) refill(index);
    const std::string label = fmt::format("op {} on rank {}", index, rank_);
    CallOptions options;
    if (is_reduction(op.what)) {
      if (op.op == comm::ReduceOp::PreMulSum) options.factor = factor_of(op, program_.ranks[rank_]);
      if (op.op == comm::ReduceOp::Average) options.divide_by = op.divide_by;
    }
    if (op.labelled && chance(op, 8)) options.label = label;
    if (op.labelled && chance(op, 9)) options.timeout = 2 * deadline_;
    if (op.labelled && chance(op, 14)) options.advice = "or this is not the program";
    if (op.labelled && op.seed % 3 == 0) {
      options.context = {.name = "Random", .number = 1 + static_cast<uint32_t>(index), .pass = 1};
    }
    const auto in = tensors_of(call.inputs), out = tensors_of(call.outputs);
    switch (op.what) {
      case What::AllReduce:
        return group.all_reduce(out[0], op.op, options);
      case What::Reduce:
        return group.reduce(out[0], call.root, op.op, options);
      case What::ReduceScatter:
        return op.list ? group.reduce_scatter(out[0], in, op.op, options)
                       : group.reduce_scatter(out[0], in[0], op.op, options);
      case What::AllGather:
        return op.list ? group.all_gather(out, in[0], options)
                       : group.all_gather(out[0], in[0], options);
      case What::Broadcast:
        return group.broadcast(out[0], call.root, options);
      case What::Gather:
        return group.gather(out, in[0], call.root, options);
      case What::Scatter:
        return group.scatter(out[0], in, call.root, options);
      case What::AllToAll:
        return op.list ? group.all_to_all(out, in, options)
                       : group.all_to_all(out[0], in[0], options);
      case What::Message:
        return call.sends ? group.send(in[0], call.to, static_cast<int>(op.seed % 5), options)
                          : group.recv(out[0], call.root, static_cast<int>(op.seed % 5), options);
      case What::SendRecv:
        return group.send_recv(
            out[0], in[0], {.to = call.to, .from = call.root, .tag = static_cast<int>(op.seed % 5)},
            options);
      case What::AllReduces:
        return group.all_reduce(out, op.op, options);
      case What::Broadcasts:
        return group.broadcast(out, call.root, options);
      case What::AllGathers:
        return group.all_gather(out, in, options);
      case What::ReduceScatters:
        return group.reduce_scatter(out, in, op.op, options);
      case What::Barrier:
        return group.barrier(options);
      default:
        exchange_bytes(op, group, call, options);
        return {};
    }
  }

  void exchange_bytes(const Op& op, const Group& group, const Call& call,
                      const CallOptions& options) {
    const std::string mine = saying(program_, op, rank_);
    std::vector<std::string> want, got;
    for (const int member : call.members) want.push_back(saying(program_, op, member));
    if (op.what == What::AllGatherBytes) {
      got = group.all_gather_bytes(mine, options);
    } else if (op.what == What::GatherBytes) {
      got = group.gather_bytes(mine, call.root, options);
      if (call.rank != call.root) want.clear();
    } else {
      got = {group.broadcast_bytes(mine, call.root, options)};
      want = {want[call.root]};
    }
    if (got != want) throw Difference("bytes differ");
  }

  void wait(const Step& step) {
    std::vector<int> order = step.ops;
    Dice dice(mixed(step.seed, program_.ranks[rank_]));
    dice.shuffle(order);
    if (order.size() > 1) wait_together(order, dice.below(3));
    for (const int op : order) {
      const int next = program_.ops[op].then;
      if (next >= 0) reference_.run(next);
      const bool dropped = drops(program_, op, rank_);
      if (!dropped) wait_for(op);
      works_[op] = Work();
      if (dropped && !step.settled) continue;
      check(op);
      if (next >= 0) check(next);
    }
  }

  // For several operations of which none goes on with another.
  void wait_together(const std::vector<int>& ops, int64_t how) {
    std::vector<Work> works;
    for (const int op : ops) works.push_back(works_[op]);
    if (how == 1) comm::wait_all(works);
    while (how == 2 && !works.empty()) {
      const size_t over = comm::wait_any(works);
      if (!works[over].is_completed()) throw Difference("wait_any() chose what is not over");
      works.erase(works.begin() + static_cast<std::ptrdiff_t>(over));
    }
  }

  void wait_for(int op) {
    Work work = works_[op];
    if (program_.ops[op].polls && chance(program_.ops[op], 15)) {
      const auto start = steady_clock::now();
      while (!work.wait_for(std::chrono::microseconds(program_.ops[op].seed % 300))) {
        if (steady_clock::now() - start > deadline_)
          throw Difference(fmt::format("op{} is never over", op));
      }
    }
    if (program_.ops[op].polls && chance(program_.ops[op], 11)) {
      const auto start = steady_clock::now();
      while (!work.is_completed()) {
        sched_yield();
        if (steady_clock::now() - start > deadline_)
          throw Difference(fmt::format("op{} is never completed", op));
      }
    }
    work.wait();
    if (!work.is_completed())
      throw Difference(fmt::format("op{} is not completed after wait()", op));
  }

  void check(int op) {
    if (!plan_.calls[op][rank_]) return;
    for (const View& view : plan_.calls[op][rank_]->outputs)
      check(view.arena, view.places(), fmt::format("op{}", op));
  }

  void check(int arena, const std::vector<int64_t>& places, const std::string& what) {
    if (places.empty()) return;
    const at::Tensor got = arenas_[arena].cpu();
    const std::string text =
        reference_.difference(arena, rank_, static_cast<const char*>(got.const_data_ptr()), places);
    if (!text.empty()) throw Difference(fmt::format("after {}: {}", what, text));
  }

  // That nothing was written where it does not belong, and that shared memory is shared.
  void check_all() {
    for (size_t a = 0; a < arenas_.size(); ++a) {
      if (!arenas_[a].defined()) continue;
      std::vector<int64_t> places(plan_.arena_sizes[a]);
      std::iota(places.begin(), places.end(), 0);
      check(static_cast<int>(a), places, fmt::format("all, in m{}", a));
      const Group& group = groups_[program_.arenas[a].group];
      if (!whole_[a].defined() || group.size() == 1) continue;
      group.barrier().wait();
      const auto ranks = members(program_, program_.arenas[a].group, rank_);
      for (size_t r = 0; r < ranks.size(); ++r) {
        const at::Tensor part = whole_[a].narrow(0, static_cast<int64_t>(r) * plan_.arena_sizes[a],
                                                 plan_.arena_sizes[a]);
        if (places.empty()) continue;
        const std::string text = reference_.difference(
            static_cast<int>(a), ranks[r], static_cast<const char*>(part.const_data_ptr()), places);
        if (!text.empty())
          throw Difference(fmt::format("rank {}'s part of shared m{}: {}", r, a, text));
      }
    }
  }

  const Program& program_;
  const Plan plan_;
  Reference reference_;
  const int rank_;
  const at::Device device_;
  const milliseconds deadline_;
  std::vector<Group> groups_;
  std::vector<at::Tensor> arenas_, whole_;
  std::vector<Work> works_;
  size_t at_ = 0;
  std::optional<int> late_;
};

}  // namespace

void run(const Group& group, at::Device device, const Program& program, milliseconds deadline) {
  Runner(group, device, program, deadline).run();
}

}  // namespace lockstep::random_group

#include "random/group/plan.h"

#include <algorithm>
#include <numeric>

#include "random/common/dice.h"

namespace lockstep::random_group {
namespace {

enum class Use { Input, Output };

// Sizes that multiply to `count`.
std::vector<int64_t> factors(int64_t count, Dice& dice) {
  std::vector<int64_t> sizes;
  for (int64_t factor : {2, 3, 5, 7}) {
    if (count > 0 && count % factor == 0 && dice.one_in(2)) {
      sizes.push_back(factor);
      count /= factor;
    }
  }
  sizes.push_back(count);
  if (dice.one_in(3))
    sizes.insert(sizes.begin() + dice.below(static_cast<int64_t>(sizes.size()) + 1), 1);
  return sizes;
}

// Strides in which the dimensions lie in memory in the order of `order`, the last closest, `gap`
// apart.
std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, const std::vector<size_t>& order,
                                int64_t gap) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = gap;
  for (size_t k = order.size(); k-- > 0;) {
    strides[order[k]] = step;
    step *= std::max<int64_t>(1, sizes[order[k]]);
  }
  return strides;
}

// A view of `count` elements, at offset 0.
View shaped(int64_t count, Use use, bool plain, Dice& dice) {
  View view;
  view.sizes = {count};
  view.strides = {1};
  if (plain) return view;
  if (count == 0) {
    if (dice.one_in(2)) return view;
    view.sizes = {dice.below(4), 0, dice.below(3)};
    view.strides = {dice.below(9), 1 + dice.below(3), dice.below(2)};
    return view;
  }
  if (count == 1 && dice.one_in(2)) {
    view.sizes.assign(dice.below(4), 1);
    view.strides.clear();
    for (size_t i = 0; i < view.sizes.size(); ++i)
      view.strides.push_back(dice.pick<int64_t>({0, 1, 2, 5, 64}));
    return view;
  }
  if (dice.one_in(3)) return view;
  view.sizes = factors(count, dice);
  std::vector<size_t> order(view.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (dice.one_in(2)) dice.shuffle(order);
  view.strides = strides_of(view.sizes, order, dice.pick<int64_t>({1, 1, 1, 2, 3}));
  for (size_t i = 0; i < view.sizes.size(); ++i) {
    if (view.sizes[i] == 1 && dice.one_in(2)) view.strides[i] = dice.pick<int64_t>({0, 1, 3, 17});
    if (use == Use::Input && dice.one_in(8)) view.strides[i] = 0;  // an expanded tensor
  }
  return view;
}

int64_t extent(const View& view) {
  if (view.numel() == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < view.sizes.size(); ++i) last += (view.sizes[i] - 1) * view.strides[i];
  return last + 1;
}

// Elements of the part that goes from one rank to another; of a part that belongs to a rank.
int64_t part(const Op& op, int first, int from, int to) {
  Dice dice(mixed(op.seed, 100 + from, 200 + to));
  if (!op.list && op.what != What::Gather && op.what != What::Scatter) return op.count;
  if (dice.one_in(4)) return 0;
  (void)first;
  return dice.below(op.count + 1);
}

// Puts views one behind the other.
class Packing {
 public:
  Packing(const Program& program, const Op& op, Use use, int rank, uint64_t number)
      : plain_(op.plain),
        use_(use),
        dice_(mixed(op.seed, (use == Use::Input ? 1 : 2) + 2 * number, program.ranks[rank])) {
    if (!plain_ && dice_.one_in(2)) end_ = dice_.below(9);
  }

  View add(int64_t count) {
    View view = shaped(count, use_, plain_, dice_);
    if (!plain_ && dice_.one_in(3)) end_ += dice_.below(5);
    view.offset = end_;
    end_ += extent(view);
    return view;
  }
  int64_t end() const { return end_; }

 private:
  bool plain_;
  Use use_;
  Dice dice_;
  int64_t end_ = 0;
};

struct Counts {
  std::vector<int64_t> inputs, outputs;
};

Counts counts_of(const Program& program, const Op& op, const Call& call) {
  const auto size = static_cast<int64_t>(call.members.size());
  const auto name = [&](int member) { return program.ranks[call.members[member]]; };
  const auto one = [&](int member) { return part(op, 0, name(member), 0); };
  const int me = call.rank;
  std::vector<int64_t> each, to, from;
  for (int r = 0; r < static_cast<int>(size); ++r) {
    each.push_back(one(r));
    to.push_back(part(op, 0, name(me), name(r)));
    from.push_back(part(op, 0, name(r), name(me)));
  }
  const std::vector<int64_t> whole{size * op.count}, nothing;
  // Of several tensors: each one's.
  std::vector<int64_t> several, wide;
  for (int i = 0; i < tensors_of(op); ++i) {
    Dice dice(mixed(op.seed, 300 + i));
    several.push_back(dice.one_in(4) ? 0 : dice.below(op.count + 1));
    if (op.twice && is_in_place(op.what) && i + 1 == tensors_of(op)) several[i] = several[0];
    wide.push_back(size * several[i]);
  }
  switch (op.what) {
    case What::AllReduces:
    case What::Broadcasts:
      return {{}, several};
    case What::AllGathers:
      return {several, wide};
    case What::ReduceScatters:
      return {wide, several};
    case What::SendRecv:
      return {{part(op, 0, name(me), name(call.to))}, {part(op, 0, name(call.root), name(me))}};
    case What::AllReduce:
    case What::Reduce:
    case What::Broadcast:
      return {{}, {op.count}};
    case What::ReduceScatter:
      return {op.list ? each : whole, {each[me]}};
    case What::AllGather:
      return {{each[me]}, op.list ? each : whole};
    case What::Gather:
      return {{each[me]}, me == call.root ? each : nothing};
    case What::Scatter:
      return {me == call.root ? each : nothing, {each[me]}};
    case What::AllToAll:
      return {op.list ? to : whole, op.list ? from : whole};
    case What::Message:
      return {call.sends ? std::vector{op.count} : nothing,
              call.receives ? std::vector{op.count} : nothing};
    default:
      return {};
  }
}

// Which buffer of the two a rank uses.
int buffer_of(const Program& program, const Op& op, Use use, int rank) {
  const int name = program.ranks[rank];
  return use == Use::Output || op.overlaps ? op.outputs[mixed(op.seed, 4, name) % 2]
                                           : op.inputs[mixed(op.seed, 3, name) % 2];
}

// The part of `whole` that is rank `rank`'s of `size`, both plain.
View part_of(const View& whole, int64_t count, int rank) {
  View view = whole;
  view.offset += rank * count;
  view.sizes = {count};
  return view;
}

}  // namespace

int64_t View::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

std::vector<int64_t> View::places() const {
  std::vector<int64_t> result;
  const int64_t count = numel();
  result.reserve(count);
  std::vector<int64_t> index(sizes.size());
  int64_t place = offset;
  for (int64_t k = 0; k < count; ++k) {
    result.push_back(place);
    for (size_t d = sizes.size(); d-- > 0;) {
      place += strides[d];
      if (++index[d] < sizes[d]) break;
      place -= sizes[d] * strides[d];
      index[d] = 0;
    }
  }
  return result;
}

Plan::Plan(const Program& program)
    : buffers(program.buffers.size()),
      arena_sizes(program.arenas.size()),
      calls(program.ops.size()) {
  for (size_t k = 0; k < program.ops.size(); ++k) {
    const Op& op = program.ops[k];
    calls[k].resize(program.size());
    for (int rank = 0; rank < program.size(); ++rank) {
      if (!takes_part(program, static_cast<int>(k), rank)) continue;
      Call call;
      call.members = members(program, op.group, rank);
      const int size = static_cast<int>(call.members.size());
      call.rank = static_cast<int>(std::find(call.members.begin(), call.members.end(), rank) -
                                   call.members.begin());
      call.root = op.root % size;
      if (op.what == What::Message) {
        call.to = (call.root + 1 + op.to % std::max(1, size - 1)) % size;
        call.sends = call.rank == call.root;
        call.receives = call.rank == call.to;
        if (size == 1 || (!call.sends && !call.receives)) continue;
      }
      if (op.what == What::SendRecv) {
        const int far = op.to % size;
        call.to = (call.rank + far) % size, call.root = (call.rank + size - far) % size;
      }
      const Counts counts = counts_of(program, op, call);
      const auto place = [&](Use use, const std::vector<int64_t>& sizes) {
        const int own[] = {buffer_of(program, op, use, rank),
                           op.others[use == Use::Output || op.overlaps]};
        Packing packings[] = {{program, op, use, rank, 0}, {program, op, use, rank, 1}};
        std::vector<View> views;
        for (size_t i = 0; i < sizes.size(); ++i) {
          if (op.twice && i > 0 && is_in_place(op.what) && i + 1 == sizes.size()) {
            views.push_back(views[0]);
            break;
          }
          const bool is_other =
              is_several(op.what) && op.others[0] >= 0 && mixed(op.seed, 400 + i) % 3 == 0;
          views.push_back(packings[is_other].add(sizes[i]));
          views.back().buffer = own[is_other];
          int64_t& most = buffers[own[is_other]].count;
          most = std::max(most, packings[is_other].end());
        }
        return views;
      };
      call.inputs = place(Use::Input, counts.inputs);
      call.outputs = place(Use::Output, counts.outputs);
      calls[k][rank] = std::move(call);
    }
  }
  for (size_t b = 0; b < buffers.size(); ++b) {
    int64_t& end = arena_sizes[program.buffers[b].arena];
    buffers[b].begin = end;
    end += buffers[b].count;
  }
  for (size_t k = 0; k < program.ops.size(); ++k) {
    for (int rank = 0; rank < program.size(); ++rank) {
      if (!calls[k][rank]) continue;
      Call& call = *calls[k][rank];
      for (auto* views : {&call.inputs, &call.outputs}) {
        for (View& view : *views) {
          view.arena = program.buffers[view.buffer].arena;
          view.offset += buffers[view.buffer].begin;
        }
      }
      const Op& op = program.ops[k];
      if (!op.in_place || !op.plain || op.list) continue;
      if (op.what == What::AllGather) call.inputs = {part_of(call.outputs[0], op.count, call.rank)};
      if (op.what == What::ReduceScatter)
        call.outputs = {part_of(call.inputs[0], op.count, call.rank)};
    }
  }
}

}  // namespace lockstep::random_group

#include "parallel/lanes/plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/reduce/tree.h"
#include "comm/transport.h"
#include "parallel/ddp/gradients.h"

namespace lockstep::parallel {
namespace {

using Slot = std::function<const at::Tensor&(int)>;

// Adds slot `top` to the one below, and so on, `count` times.
void carry(int top, int count, const Slot& slot) {
  for (int k = 1; k <= count; ++k) slot(top - k).add_(slot(top - k + 1));
}

}  // namespace

LanePlan::LanePlan(const Group& g, int64_t count) : group(g), lanes(count), sum(g, count) {
  std::vector<int> done;
  int depth = 0;
  for (int64_t lane = sum.lanes().begin; lane < sum.lanes().end; ++lane) {
    done.push_back(static_cast<int>(lane));
    const int after = static_cast<int>(comm::maximal_nodes(done, static_cast<int>(lanes)).size());
    const int carries = depth + 1 - after;
    moves.push_back(carries == 0 ? Move{depth, false, 0} : Move{depth - 1, true, carries - 1});
    depth = after;
    slots = std::max(slots, moves.back().slot + 1);
  }
  group.transport().begin_lanes(lanes);
}

LanePlan::~LanePlan() { group.transport().end_lanes(); }

std::string LanePlan::name(int64_t own_lane) const {
  return fmt::format("lane {} of {}", sum.lanes().begin + own_lane, lanes);
}

void LanePlan::place(int64_t own_lane, const at::Tensor& value,
                     const std::function<const at::Tensor&(int)>& slot) const {
  const Move& move = moves[own_lane];
  if (move.adds) {
    slot(move.slot).add_(value);
  } else {
    copy_into(slot(move.slot), value);
  }
  carry(move.slot, move.carries, slot);
}

void LanePlan::place_pair(int64_t own_lane, const at::Tensor& before, const at::Tensor& value,
                          const std::function<const at::Tensor&(int)>& slot) const {
  const Move& move = moves[own_lane];
  if (move.carries == 0) {
    at::Tensor target = slot(move.slot);
    at::add_out(target, before, value);
    return;
  }
  slot(move.slot - 1).add_(before.add_(value));
  carry(move.slot - 1, move.carries - 1, slot);
}

int64_t addends_of(const Group& group) {
  const int64_t lanes = group.transport().lanes();
  return lanes > 0 ? lanes : group.size();
}

}  // namespace lockstep::parallel

#include "parallel/lanes/plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "comm/reduce/tree.h"
#include "comm/transport.h"
#include "parallel/ddp/gradients.h"

namespace lockstep::parallel {

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
  for (int k = 1; k <= move.carries; ++k) slot(move.slot - k).add_(slot(move.slot - k + 1));
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
  for (int k = 2; k <= move.carries; ++k) slot(move.slot - k).add_(slot(move.slot - k + 1));
}

int64_t addends_of(const Group& group) {
  const int64_t lanes = group.transport().lanes();
  return lanes > 0 ? lanes : group.size();
}

}  // namespace lockstep::parallel

// How a rank adds up its lanes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/reduce/node_sum.h"
#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// Partial sums are on a stack of slots. A lane's value goes on top, or is added to the top, and
// then tops are added to what lies below as long as the two are the halves of a node of the tree.
// After the rank's last lane slot k holds its k-th node. At most log2 of its lanes, and one, are in
// use.
struct LanePlan {
  struct Move {
    int slot;     // where the lane's value goes
    bool adds;    // to what is there
    int carries;  // then slot - k is increased by slot - k + 1, for k = 1 ... carries
  };

  LanePlan(const Group& group, int64_t lanes);
  ~LanePlan();
  LanePlan(const LanePlan&) = delete;
  LanePlan& operator=(const LanePlan&) = delete;

  int64_t own_lanes() const { return sum.lanes().size(); }
  bool is_open() const { return open >= 0; }
  // Whether a backward() communicates: outside of lanes, and in a rank's last one.
  bool meets() const { return !is_open() || open + 1 == own_lanes(); }
  // "lane 3 of 8"
  std::string name(int64_t own_lane) const;
  // Applies a lane's move to tensors of one shape, where slot(k) is the one of slot k.
  void place(int64_t own_lane, const at::Tensor& value,
             const std::function<const at::Tensor&(int)>& slot) const;
  // The same for the lane before, whose value has not been placed, and this one, which is added to
  // it. May write to `before`.
  void place_pair(int64_t own_lane, const at::Tensor& before, const at::Tensor& value,
                  const std::function<const at::Tensor&(int)>& slot) const;

  Group group;
  int64_t lanes;
  comm::NodeSum sum;
  std::vector<Move> moves;        // by own lane
  int slots = 0;                  // how many are in use at most
  mutable int64_t open = -1;      // the own lane that a loop is in
  mutable bool has_pass = false;  // a backward() outside of hold() has begun in it
};

// Over lanes, where Ddps of the group have any; else over ranks.
int64_t addends_of(const Group& group);

}  // namespace lockstep::parallel

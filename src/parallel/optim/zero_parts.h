// How a ZeroOptimizer shards its parameters.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/core/shard.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/layout/flat_layout.h"

namespace lockstep::parallel {

// A tensor's elements in the order of memory.
inline at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

// Part of a parameter that one rank updates.
struct Portion {
  size_t parameter;
  Range range;  // of its elements in memory
  at::Tensor leaf;
};

// All parameters of one dtype in one memory, the last first: nearly as their gradients lie in Ddp's
// buckets, so that a rank mostly updates with what it has just added up.
struct Flat {
  FlatLayout layout;
  std::vector<size_t> members;  // parameters, as laid out
  at::Tensor memory = {};
  std::vector<int64_t> cuts = {};  // by rank, and the end
};

struct ZeroOptimizer::Parts {
  Group group;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> places;  // of the parameters in the flats
  std::vector<Flat> flats;
  std::vector<Portion> portions;
  std::unique_ptr<Optimizer> optimizer;
  bool shared = false;
  uint32_t caller = 0;  // which ZeroOptimizer of the group this is
  // Of shared parameters, when all ranks last had the same: to see which ranks write to them.
  std::vector<int64_t> versions;
  uint64_t loads = 0;  // checkpoint::loads() at that time

  void lay_out(bool share);
  void take_memory(bool share);
  at::Tensor part_of(size_t parameter, const Range& range) const;
  bool is_elsewhere(size_t parameter) const;
  bool any_elsewhere() const;
  void check_same_type() const;
  void copy_in();
  void move();
  void alias();
  std::vector<OptimizerParamGroup> own_groups(std::vector<OptimizerParamGroup>& groups);
  void check_gradients() const;
  void point_to_gradients();
  void note_versions();
  at::Tensor written() const;
  void meet(at::Tensor written);
  void step();
  // A collective that compares the ranks' options.
  void call(const std::function<void(const comm::CallOptions&)>& collective) const;
  void spread();
  void count_updates() const;
};

// So that a ZeroOptimizer that is given to a Checkpointer as an Optimizer is tracked as what it is.
void track_zero_optimizers();

}  // namespace lockstep::parallel

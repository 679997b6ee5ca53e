// How this process divides samples among ranks, for Ddp and Fsdp to compare: where the ranks'
// orders differ, samples come several times or never.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/data/sampler.h"

namespace lockstep::data {

// Without the epoch: ranks that take several batches a step may be in the next one.
struct DividedOrder {
  int64_t seed = 0;  // 0 unless shuffled
  int64_t length = 0;
  int64_t parts = 0;
  int64_t shuffle = 0;  // 1 or 0: this goes from rank to rank as bytes

  auto operator<=>(const DividedOrder&) const = default;
};

std::string text_of(const DividedOrder& order);

// A pass over a part begins or goes on. Samples of one part only are not divided, and do not count.
// Any thread.
void note_order(const SamplerState& state, const Shard& part);

// The orders of passes that begin or go on after its construction, each once, for what trains by
// them: not those of a thread that has called another one of these and never this one, which is
// another training, on a group of its own. One thread at a time.
class NewOrders {
 public:
  NewOrders();
  ~NewOrders();
  NewOrders(const NewOrders&) = delete;
  NewOrders& operator=(const NewOrders&) = delete;

  // Whether take() has any. Costs the reading of a number while no pass begins.
  bool any();
  // The next any() and take() leave these out. Sorted.
  std::vector<DividedOrder> take();

 private:
  std::vector<DividedOrder> find() const;
  void note_thread() const;

  uint64_t since_;  // passes that are done with
  std::vector<DividedOrder> taken_;
};

}  // namespace lockstep::data

// Over how many ranks a strategy shards the model, and the memory in which it is exchanged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/plan/strategy.h"

namespace lockstep::plan {

bool is_fsdp(Strategy strategy);
// Within a node only.
bool is_hybrid(Strategy strategy);
// Parameters stay whole from a unit's forward to its backward.
bool keeps_parameters(Strategy strategy);

// With nothing recomputed where only Fsdp does it, and this is not Fsdp.
Training under(Training training, Strategy strategy);

// Throws ConfigError, in the name of `who`, for what cannot be trained: sizes below 1, more ranks
// than are planned or than there are lanes.
void check_training(const Training& training, const Machine& machine, int64_t ranks,
                    const char* who);

int64_t shard_ranks(Strategy strategy, const Machine& machine, int64_t ranks);

// How many tensors are trained.
size_t parameters_of(const ModelProfile& model);

// Whether backward computes the unit's forward once more.
bool is_twice(const ProfileUnit& unit, const Training& training);
// How often forward and backward compute what the unit's forward does.
double passes_through(const ProfileUnit& unit, const Training& training);

// Whether Fsdp's ranks have one copy of the parameters, so that nothing is gathered.
bool shares_parameters(const Machine& machine, const Ranks& ranks);
// Seconds of Fsdp's calls that move neither parameters nor gradients: where ranks share the
// parameters, the barrier before a micro-batch's forward; and in each step, what ranks tell each
// other of its backward once all gradients have come.
double meeting_seconds(const Machine& machine, const Ranks& ranks);
double telling_seconds(const ModelProfile& model, const Machine& machine, const Ranks& ranks);

// One of Ddp's buckets.
struct BucketSize {
  double bytes = 0;
  double largest = 0;  // bytes of the largest gradient in it
};

// Ddp's buckets in the order in which backward fills them.
std::vector<BucketSize> bucket_sizes(const ModelProfile& model, const Training& training);

// Partial sums that a rank with lanes holds, each as large as all gradients: a tree over lane
// numbers leaves this many. Exact where the lanes are a multiple of the ranks; else at most.
int64_t lane_slots(const Training& training, int64_t ranks);

// What memory that ranks of one host share takes: whole pages, and from 2 MiB on whole pages of
// 2 MiB, as Group::empty() and Group::shared() give it.
double shared_memory_bytes(double bytes);

}  // namespace lockstep::plan

// Whether ranks that learn by GRPO (lockstep/rl/run.h) each keep all of their model or shard it,
// by what `lockstep plan --grpo` counts.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/comm/world.h"
#include "lockstep/models/transformer.h"
#include "lockstep/plan/grpo_memory.h"
#include "lockstep/rl/run.h"
#include "lockstep/train/model_config.h"

namespace lockstep::plan {

// The sizes of a model, as plans and configurations have them.
train::TransformerConfig sizes_of(const models::TransformerOptions& options);

// The most that a rank of a run writes, to learn or in an evaluation, and learns from at a time:
// episodes that fill the context.
GrpoOptions grpo_options(const rl::RunOptions& options, const train::TransformerConfig& sizes,
                         int64_t ranks);

// RunOptions::parallel for a run of these options: "ddp" where the part of its host's memory that
// each rank has holds all of the model, the reference and the optimizer, else "fsdp". "ddp" for the
// tiny model and one rank, "fsdp" where the reference is to be sharded. GPUs, whose memory is not
// known here: "fsdp". Every rank calls it and gets the same. A model that cannot be read is left to
// run_continual(), which says so on all ranks.
std::string placement(const rl::RunOptions& options, const comm::World& world);

// As placement(), for this many ranks that all compute on this host's CPUs, without asking them.
// Throws ConfigError for a model that cannot be read.
std::string placement_here(const rl::RunOptions& options, int64_t ranks);

// Throws ConfigError on all ranks where the states of such a run alone (weights, gradients,
// optimizer and reference, as RunOptions::parallel divides them) are more than a rank's part of its
// host's memory. Every rank calls it. Nothing for GPUs, the tiny model, and a model that cannot be
// read.
void check_memory(const rl::RunOptions& options, const comm::World& world);

// The memory of each of `ranks` ranks in such a run, whole and sharded, and this host's part of
// each: lines of text. Throws ConfigError for a model that cannot be read.
std::string memory_text(const rl::RunOptions& options, int64_t ranks);

}  // namespace lockstep::plan

// The part of seed_everything(seed, group) that Ddp does at construction.
#pragma once

namespace lockstep::parallel {

// Whether it was called in this process.
bool is_seeded_for_ranks();
// Once after each such call: from now on this rank draws numbers of its own.
void begin_rank_stream();

}  // namespace lockstep::parallel

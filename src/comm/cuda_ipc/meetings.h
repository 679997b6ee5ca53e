// How kernels of several ranks meet, and what they tell the host, for the kernels: as arithmetic.h,
// for two compilers, of which the host's brings what CUDA has of its own.
#pragma once

#include "comm/cuda_ipc/calls.h"

namespace lockstep::comm::cuda_ipc {

#ifdef __CUDACC_RTC__
__device__ inline void store_release(U64* at, U64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline U64 load_acquire(const U64* at) {
  U64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void pause() { __nanosleep(20); }
__device__ inline U32 add_one(U32* to) { return atomicAdd(to, 1); }
#endif

__device__ inline Flags& flags_of(const Peers& peers, int rank) {
  return *reinterpret_cast<Flags*>(peers.memory[rank]);
}

// Whether an earlier kernel of this rank has: the same in all threads of a block, though another
// block may write it meanwhile.
__device__ inline bool has_aborted(const Peers& peers) {
  const volatile U32* word = &flags_of(peers, peers.rank).aborted;
  return __syncthreads_or(threadIdx.x == 0 && *word != 0) != 0;
}

__device__ inline U64 word(U32 number, U32 kind) { return static_cast<U64>(number) << 32 | kind; }

// Around all of a kernel where kernels wait. A call in a CUDA graph tells the host that it runs,
// which has to know whether it waits for too long.
__device__ inline void enter(const Peers& peers, U32 captured) {
  if (captured != 0 && blockIdx.x == 0 && threadIdx.x == 0) peers.replays->running = captured;
}
// When a block is done. What only the next kernel may see of this one is for the last that leaves.
__device__ inline void leave(const Peers& peers, U32 captured, U32 rounds) {
  __syncthreads();
  Flags& own = flags_of(peers, peers.rank);
  if (threadIdx.x != 0 || add_one(&own.left) != gridDim.x - 1) return;
  own.left = 0;
  own.rounds += rounds;
  if (captured == 0) return;
  peers.replays->ended = peers.replays->ended + 1;
  if (rounds != 0) peers.replays->collectives = peers.replays->collectives + 1;
  peers.replays->running = 0;
}

// Until the flag is `value`, or at least that much. False when the host has said that it is over.
template <bool at_least>
__device__ bool wait_for(const U64* flag, U64 value, const volatile U32* is_over) {
  for (U32 looks = 1;; ++looks) {
    const U64 now = load_acquire(flag);
    if (at_least ? now >= value : now == value) return true;
    // The word is the host's memory, which is further away than the flag.
    if (looks % 64 == 0 && *is_over != 0) return false;
    pause();
  }
}

// Waits until `word_of(peer)` of every rank is `value`. False, in all threads, when it is over.
template <class WordOf>
__device__ bool wait_for_all(const Peers& peers, U64 value, const WordOf& word_of) {
  bool is_over = false;
  for (int peer = static_cast<int>(threadIdx.x); peer < peers.size && !is_over;
       peer += static_cast<int>(blockDim.x))
    is_over = !wait_for<false>(word_of(peer), value, peers.is_over);
  return __syncthreads_or(is_over) == 0;
}

// How ranks' data lie, as they have told each other.
enum class Data { InStages, AtOnePlace, Mixed };

// Where kernels wait: the meetings of blocks of one number of all ranks. Each block counts its own,
// in memory, so that a kernel knows no number beforehand.
struct Meetings {
  const Peers& peers;
  const U32 kind;
  U32 sequence;

  __device__ Meetings(const Peers& all, U32 call)
      : peers(all), kind(call), sequence(flags_of(all, all.rank).met[blockIdx.x]) {}
  // Once all threads of the block are done.
  __device__ void end() const {
    if (threadIdx.x == 0) flags_of(peers, peers.rank).met[blockIdx.x] = sequence;
  }

  // What each has written before, the others may read afterwards. False when it is over.
  __device__ bool meet(U64 where) {
    ++sequence;
    const U64 value = word(sequence, kind);
    const int half = static_cast<int>(sequence % 2);
    __syncthreads();
    for (int peer = static_cast<int>(threadIdx.x); peer < peers.size;
         peer += static_cast<int>(blockDim.x)) {
      Flags& flags = flags_of(peers, peer);
      flags.where[half][peers.rank][blockIdx.x] = where;
      store_release(&flags.arrived[half][peers.rank][blockIdx.x], value);
    }
    Flags& own = flags_of(peers, peers.rank);
    const bool all_have =
        wait_for_all(peers, value, [&](int peer) { return &own.arrived[half][peer][blockIdx.x]; });
    if (!all_have && threadIdx.x == 0) own.aborted = 1;
    return all_have;
  }

  // What they have said of their data at the last meeting: the same in all threads of all ranks.
  __device__ Data data(U64 own_where) const {
    const Flags& own = flags_of(peers, peers.rank);
    bool some_direct = false, some_other = false;
    for (int peer = static_cast<int>(threadIdx.x); peer < peers.size;
         peer += static_cast<int>(blockDim.x)) {
      const U64 where = own.where[sequence % 2][peer][blockIdx.x];
      some_direct = some_direct || where != 0;
      some_other = some_other || where != own_where;
    }
    const bool is_direct = __syncthreads_or(some_direct) != 0;
    const bool differs = __syncthreads_or(some_other) != 0;
    return !is_direct ? Data::InStages : differs ? Data::Mixed : Data::AtOnePlace;
  }
};

// Where streams wait: what this rank has written before, the others may read. Not once it is over,
// or where earlier kernels have done nothing: who comes late must not take that for sums.
__device__ inline void arrive(const Peers& peers, U32 sequence, U32 kind) {
  if (flags_of(peers, peers.rank).passed != sequence - 1 || *peers.is_over != 0) return;
  for (int peer = static_cast<int>(threadIdx.x); peer < peers.size;
       peer += static_cast<int>(blockDim.x))
    store_release(&peers.arrivals[peer].arrived[peers.rank][sequence % kMeetings],
                  word(sequence, kind));
}

// After this rank's stream has waited: the words are there, and it is left to see whether the
// others called the same. Or it is over, and the words are the host's.
__device__ inline void check(const Peers& peers, U32 sequence, U32 kind) {
  const Arrivals& own = peers.arrivals[peers.rank];
  const bool has_met = wait_for_all(peers, word(sequence, kind), [&](int peer) {
    return &own.arrived[peer][sequence % kMeetings];
  });
  if (threadIdx.x != 0) return;
  Flags& flags = flags_of(peers, peers.rank);
  (has_met ? flags.passed : flags.aborted) = has_met ? sequence : 1u;
}

}  // namespace lockstep::comm::cuda_ipc

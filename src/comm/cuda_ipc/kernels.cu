// The kernels. The library holds this text, and NVRTC compiles it for the device that it finds;
// tests compile it for the host, with threads in place of a block's. Without flags only
// lockstep_copy and lockstep_message; with LOCKSTEP_ELEMENT, LOCKSTEP_COMBINE and LOCKSTEP_RANKS
// lockstep_combine for these. Products must not be fused with sums (--fmad=false).
#include "comm/cuda_ipc/arithmetic.h"
#include "comm/cuda_ipc/calls.h"
#include "comm/cuda_ipc/meetings.h"

namespace lockstep::comm::cuda_ipc {

struct Span {
  U64 begin, end;
};

// One block's part of `bytes`: whole packets, but at the end.
__device__ inline Span span_of(U64 bytes, U64 block, U64 blocks) {
  const U64 packets = (bytes + kPacket - 1) / kPacket;
  const U64 end = packets * (block + 1) / blocks * kPacket;
  return {packets * block / blocks * kPacket, end < bytes ? end : bytes};
}

// A block's part of the first `bytes` of a `whole`, which is cut in the same way whatever `bytes`
// is: in a call's last round, which takes less than a stage holds, no block may come to what
// another one still reads of an earlier round.
__device__ inline Span span_within(U64 bytes, U64 whole) {
  Span part = span_of(whole, blockIdx.x, gridDim.x);
  if (part.end > bytes) part.end = bytes;
  if (part.begin > part.end) part.begin = part.end;
  return part;
}

// A thread has several reads under way, or it would wait for each.
template <class Unit>
__device__ U64 copy_as(char* to, const char* from, U64 bytes) {
  constexpr U64 kAhead = 4;
  const U64 count = bytes / sizeof(Unit);
  for (U64 first = threadIdx.x; first < count; first += kAhead * blockDim.x) {
    Unit units[kAhead];
    for (U64 i = 0; i < kAhead; ++i) {
      const U64 at = first + i * blockDim.x;
      units[i] = at < count ? reinterpret_cast<const Unit*>(from)[at] : Unit{};
    }
    for (U64 i = 0; i < kAhead; ++i) {
      const U64 at = first + i * blockDim.x;
      if (at < count) reinterpret_cast<Unit*>(to)[at] = units[i];
    }
  }
  return count * sizeof(Unit);
}

struct alignas(kPacket) Sixteen {
  U64 low, high;
};

// A function of its own, as what combines is: else the compiler takes a second for each kernel.
__attribute__((noinline)) __device__ void copy(char* to, const char* from, U64 bytes) {
  const U64 addresses = reinterpret_cast<U64>(to) | reinterpret_cast<U64>(from);
  U64 done = 0;
  if (addresses % kPacket == 0) {
    done = copy_as<Sixteen>(to, from, bytes);
  } else if (addresses % sizeof(U32) == 0) {
    done = copy_as<U32>(to, from, bytes);
  }
  copy_as<char>(to + done, from + done, bytes - done);
}

__device__ inline void copy_part(char* to, const char* from, U64 bytes, U64 whole) {
  const Span part = span_within(bytes, whole);
  if (part.begin < part.end) copy(to + part.begin, from + part.begin, part.end - part.begin);
}

// One of a call's rounds.
struct Turn {
  const Round& round;
  U64 begin;
  U64 stage;  // where it begins in each rank's memory

  // `first`: the stage of the call's first round, modulo 2.
  __device__ Turn(const Round& all, U32 number, U32 first)
      : round(all),
        begin(all.begin + number * all.room),
        stage(all.stages + (first + number) % 2 * all.stage_bytes) {}
  __device__ U64 bytes(const Piece& piece) const {
    const U64 left = begin < piece.bytes ? piece.bytes - begin : 0;
    return left < round.room ? left : round.room;
  }
  // Of its first round, the largest.
  __device__ U64 whole(const Piece& piece) const {
    return piece.bytes < round.room ? piece.bytes : round.room;
  }
  __device__ char* slot(int rank, const Piece& piece) const {
    return round.peers.memory[rank] + stage + piece.slot;
  }

  __device__ void put_in() const {
    for (int i = 0; i < round.in_count; ++i) {
      const Piece& piece = round.in[i];
      if (bytes(piece) != 0)
        copy_part(slot(round.peers.rank, piece), piece.own + begin, bytes(piece), whole(piece));
    }
  }
  __device__ void take_out() const {
    for (int i = 0; i < round.out_count; ++i) {
      const Piece& piece = round.out[i];
      if (bytes(piece) != 0)
        copy_part(piece.own + begin, slot(piece.from, piece), bytes(piece), whole(piece));
    }
  }
};

// What is combined: bytes() that begin at each rank's source(), into all targets.
struct Combination {
  const Turn turn;
  const bool is_direct;

  __device__ Combination(const Turn& of, bool without_stages)
      : turn(of), is_direct(without_stages) {}
  __device__ const Direct& direct() const { return turn.round.direct; }
  __device__ const Piece& piece() const { return turn.round.combined; }

  __device__ U64 bytes() const { return is_direct ? direct().bytes : turn.bytes(piece()); }
  __device__ U64 whole() const { return is_direct ? direct().bytes : turn.whole(piece()); }
  __device__ const char* source(int rank) const {
    return is_direct ? direct().part[rank] : turn.slot(rank, piece());
  }
  __device__ bool has_one_target() const { return !is_direct || direct().writes == 0; }
  __device__ int targets() const { return has_one_target() ? 1 : turn.round.peers.size; }
  __device__ char* target(int i) const {
    if (!has_one_target()) return direct().part[i];
    if (is_direct) return direct().own;
    return piece().own != nullptr ? piece().own + turn.begin
                                  : turn.slot(turn.round.peers.rank, piece());
  }
};

template <class Combine>
__device__ void run_direct(const Round& round, const Combine& combine) {
  const Direct& direct = round.direct;
  if (direct.reads != 0) return combine(Combination(Turn(round, 0, 0), true));
  for (int i = 0; i < round.peers.size; ++i) {
    char* to = direct.part[(round.peers.rank + i) % round.peers.size];
    if (to != direct.own) copy_part(to, direct.own, direct.bytes, direct.bytes);
  }
}

// Where kernels wait: all of a call. Who can go without stages has put nothing into one, and does
// so late where others cannot.
template <class Combine>
__device__ void run_whole(const Round& round, const Combine& combine) {
  if (has_aborted(round.peers)) return;
  enter(round.peers, round.captured);
  // The same in all blocks: none has left.
  const U32 first = flags_of(round.peers, round.peers.rank).rounds;
  Meetings meetings(round.peers, round.kind);
  if (round.where == 0) Turn(round, 0, first).put_in();
  if (!meetings.meet(round.where)) return;
  const Data data = meetings.data(round.where);
  if (data == Data::AtOnePlace) {
    run_direct(round, combine);
    if (!meetings.meet(0)) return;
    meetings.end();
    return leave(round.peers, round.captured, round.rounds);
  }
  for (U32 number = 0; number < round.rounds; ++number) {
    const Turn turn(round, number, first);
    if (number > 0 || (data == Data::Mixed && round.where != 0)) turn.put_in();
    if ((number > 0 || data == Data::Mixed) && !meetings.meet(0)) return;
    if (round.combines != 0) combine(Combination(turn, false));
    if (round.meets_again != 0 && !meetings.meet(0)) return;
    turn.take_out();
  }
  meetings.end();
  leave(round.peers, round.captured, round.rounds);
}

template <class Combine>
__device__ void run(const Round& round, const Combine& combine) {
  const Peers& peers = round.peers;
  if (peers.arrivals == nullptr) return run_whole(round, combine);
  if ((round.steps & kArrives) != 0) return arrive(peers, round.sequence, round.kind);
  if ((round.steps & kChecks) != 0) return check(peers, round.sequence, round.kind);
  // The others may still read what is there, or have not written it.
  if (flags_of(peers, peers.rank).passed != round.sequence) return;
  const Turn turn(round, 0, round.stage);
  if ((round.steps & kPutsIn) != 0) turn.put_in();
  if ((round.steps & kCombines) != 0 && round.combines != 0) combine(Combination(turn, false));
  if ((round.steps & kTakesOut) != 0) turn.take_out();
}

struct Nothing {
  __device__ void operator()(Combination) const {}
};

// This lane's part of one chunk.
__device__ inline Span lane_of(const Message& message, U64 chunk, int lane) {
  const U64 begin = chunk * kChunkBytes;
  const U64 left = message.bytes - begin;
  const U64 bytes = left < kChunkBytes ? left : kChunkBytes;
  const Span part = span_of(bytes, static_cast<U64>(lane), kLanes);
  return {begin + part.begin, begin + part.end};
}

// That a chunk is in its slot. The number goes round, which two at a time cannot mix up.
__device__ inline U64 word_of(U64 chunk, U32 kind) {
  return word(static_cast<U32>(chunk + 1), kind);
}

__device__ inline bool send(const Peers& peers, const Message& message, int lane) {
  const U64* taken = &flags_of(peers, peers.rank).taken[message.peer][lane];
  U64* ready = flags_of(peers, message.peer).ready[peers.rank][lane];
  U64& sent = flags_of(peers, peers.rank).sent[message.peer][lane];
  const U64 first = sent;
  const U64 chunks = chunks_of(message.bytes);
  for (U64 chunk = 0; chunk < chunks; ++chunk) {
    const U64 number = first + chunk;
    const U32 half = static_cast<U32>(number % 2);
    bool is_over = false;
    // The chunk before the last one has to be gone from the slot.
    if (threadIdx.x == 0 && number >= 2)
      is_over = !wait_for<true>(taken, number - 1, peers.is_over);
    if (__syncthreads_or(is_over) != 0) return false;
    const Span part = lane_of(message, chunk, lane);
    copy(peers.memory[peers.rank] + slot_at(message.peer, lane, half),
         message.data + part.begin, part.end - part.begin);
    __syncthreads();
    if (threadIdx.x == 0) {
      store_release(&ready[half], word_of(number, message.kind));
      sent = number + 1;
    }
  }
  __syncthreads();  // the next message begins with that number
  return true;
}

__device__ inline bool receive(const Peers& peers, const Message& message, int lane) {
  const U64* ready = flags_of(peers, peers.rank).ready[message.peer][lane];
  U64* taken = &flags_of(peers, message.peer).taken[peers.rank][lane];
  U64& received = flags_of(peers, peers.rank).received[message.peer][lane];
  const U64 first = received;
  const U64 chunks = chunks_of(message.bytes);
  for (U64 chunk = 0; chunk < chunks; ++chunk) {
    const U64 number = first + chunk;
    const U32 half = static_cast<U32>(number % 2);
    bool is_over = false;
    if (threadIdx.x == 0)
      is_over = !wait_for<false>(&ready[half], word_of(number, message.kind), peers.is_over);
    if (__syncthreads_or(is_over) != 0) return false;
    const Span part = lane_of(message, chunk, lane);
    copy(message.data + part.begin,
         peers.memory[message.peer] + slot_at(peers.rank, lane, half), part.end - part.begin);
    __syncthreads();
    if (threadIdx.x == 0) {
      store_release(taken, number + 1);
      received = number + 1;
    }
  }
  __syncthreads();
  return true;
}

// Block (2 * peer + direction) * kLanes + lane, in the messages' order.
__device__ inline void run(const Messages& messages) {
  const int lane = static_cast<int>(blockIdx.x) % kLanes;
  const int sends = static_cast<int>(blockIdx.x) / kLanes % 2;
  const int peer = static_cast<int>(blockIdx.x) / kLanes / 2;
  if (has_aborted(messages.peers)) return;
  enter(messages.peers, messages.captured);
  for (int i = 0; i < messages.count; ++i) {
    const Message& message = messages.more != nullptr ? messages.more[i] : messages.all[i];
    if (message.peer != peer || message.sends != sends) continue;
    const bool goes_on =
        sends != 0 ? send(messages.peers, message, lane) : receive(messages.peers, message, lane);
    if (goes_on) continue;
    if (threadIdx.x == 0) flags_of(messages.peers, messages.peers.rank).aborted = 1;
    return;
  }
  leave(messages.peers, messages.captured, 0);
}

template <class T>
struct alignas(kPacket) Packet {
  static constexpr int kCount = kPacket / sizeof(T);
  T element[kCount];
};

// Ranks [first, first + count), split at the largest power of two below their count.
constexpr int left_of(int count) {
  int left = 1;
  while (2 * left < count) left *= 2;
  return left;
}
template <class T, int operation, int first, int count>
struct Tree {
  static __device__ Packet<T> at(const char* const* sources, U64 offset) {
    constexpr int left = left_of(count);
    const Packet<T> a = Tree<T, operation, first, left>::at(sources, offset);
    const Packet<T> b = Tree<T, operation, first + left, count - left>::at(sources, offset);
    Packet<T> both;
    for (int i = 0; i < Packet<T>::kCount; ++i)
      both.element[i] = Arithmetic<T>::template combine<operation>(a.element[i], b.element[i]);
    return both;
  }
};
template <class T, int operation, int first>
struct Tree<T, operation, first, 1> {
  static __device__ Packet<T> at(const char* const* sources, U64 offset) {
    return *reinterpret_cast<const Packet<T>*>(sources[first] + offset);
  }
};

template <class T, int operation, int ranks>
struct CombineAll {
  // Packets of each rank that a thread has under way.
  static constexpr int kAhead = ranks <= 2 ? 4 : ranks <= 4 ? 2 : 1;

  // This block's part of it.
  __attribute__((noinline)) __device__ void operator()(Combination all) const {
    const char* sources[ranks];
    for (int rank = 0; rank < ranks; ++rank) sources[rank] = all.source(rank);
    const int divide_by = all.turn.round.divide_by, targets = all.targets();
    const Span part = span_within(all.bytes(), all.whole());
    const U64 stride = blockDim.x * kPacket;
    for (U64 first = part.begin + threadIdx.x * kPacket; first < part.end;
         first += kAhead * stride) {
      Packet<T> sums[kAhead];
      for (int i = 0; i < kAhead; ++i) {
        // The last packet may go beyond the piece, but not beyond the memory.
        const U64 at = first + i * stride < part.end ? first + i * stride : first;
        sums[i] = Tree<T, operation, 0, ranks>::at(sources, at);
      }
      if (divide_by != 1) {
        for (Packet<T>& sum : sums) {
          for (T& element : sum.element) element = Arithmetic<T>::divide(element, divide_by);
        }
      }
      for (int i = 0; i < targets; ++i) {
        char* to = all.target(i);
        for (int k = 0; k < kAhead; ++k) store(sums[k], to, first + k * stride, part.end);
      }
    }
  }

  static __device__ void store(const Packet<T>& sum, char* to, U64 at, U64 end) {
    if (at + kPacket <= end && reinterpret_cast<U64>(to) % kPacket == 0) {
      *reinterpret_cast<Packet<T>*>(to + at) = sum;
    } else {
      for (int i = 0; i < Packet<T>::kCount && at + (i + 1) * sizeof(T) <= end; ++i)
        reinterpret_cast<T*>(to + at)[i] = sum.element[i];
    }
  }
};

}  // namespace lockstep::comm::cuda_ipc

#ifdef __CUDACC_RTC__
namespace ipc = lockstep::comm::cuda_ipc;
// Two blocks find room in a multiprocessor: most_blocks() in transport.cpp.
#define LOCKSTEP_BOUNDS __launch_bounds__(ipc::kThreads, 2)
#ifdef LOCKSTEP_ELEMENT
namespace lockstep::comm::cuda_ipc {
using Combine = CombineAll<LOCKSTEP_ELEMENT, LOCKSTEP_COMBINE, LOCKSTEP_RANKS>;
}
extern "C" __global__ void LOCKSTEP_BOUNDS lockstep_combine(const __grid_constant__ ipc::Round round) {
  ipc::run(round, ipc::Combine{});
}
#else
extern "C" __global__ void LOCKSTEP_BOUNDS lockstep_copy(const __grid_constant__ ipc::Round round) {
  ipc::run(round, ipc::Nothing{});
}
extern "C" __global__ void LOCKSTEP_BOUNDS lockstep_message(const __grid_constant__ ipc::Messages messages) {
  ipc::run(messages);
}
#endif
#endif

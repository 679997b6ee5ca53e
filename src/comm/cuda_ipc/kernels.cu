// The kernels. The library holds this text, and NVRTC compiles it for the device that it finds;
// tests compile it for the host, with threads in place of a block's. Without flags only
// lockstep_copy and lockstep_message; with LOCKSTEP_ELEMENT, LOCKSTEP_COMBINE and LOCKSTEP_RANKS
// lockstep_combine for these. Products must not be fused with sums (--fmad=false).
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
#endif

__device__ inline Flags& flags_of(const Peers& peers, int rank) {
  return *reinterpret_cast<Flags*>(peers.memory[rank]);
}

__device__ inline U64 word(U32 number, U32 kind) { return static_cast<U64>(number) << 32 | kind; }

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

// Blocks of one number of all ranks: what each has written before, the others may read afterwards.
// False when it is over.
__device__ inline bool meet(const Peers& peers, U32 sequence, U32 kind) {
  const U64 value = word(sequence, kind);
  const int half = static_cast<int>(sequence % 2);
  __syncthreads();
  for (int peer = static_cast<int>(threadIdx.x); peer < peers.size;
       peer += static_cast<int>(blockDim.x))
    store_release(&flags_of(peers, peer).arrived[half][peers.rank][blockIdx.x], value);
  const Flags& own = flags_of(peers, peers.rank);
  return wait_for_all(peers, value,
                      [&](int peer) { return &own.arrived[half][peer][blockIdx.x]; });
}

// Where streams wait: what this rank has written before, the others may read. Not once it is over:
// then earlier kernels may have done nothing, and who comes late must not take that for sums.
__device__ inline void arrive(const Peers& peers, U32 sequence, U32 kind) {
  if (*peers.is_over != 0) return;
  for (int peer = static_cast<int>(threadIdx.x); peer < peers.size;
       peer += static_cast<int>(blockDim.x))
    store_release(&peers.arrivals[peer].arrived[peers.rank][sequence % kMeetings],
                  word(sequence, kind));
}

// As meet(), after this rank's stream has waited: the words are there, and it is left to see whether
// the others called the same. Or it is over, and the words are the host's.
__device__ inline bool has_met(const Peers& peers, U32 sequence, U32 kind) {
  const Arrivals& own = peers.arrivals[peers.rank];
  return wait_for_all(peers, word(sequence, kind),
                      [&](int peer) { return &own.arrived[peer][sequence % kMeetings]; });
}

struct Span {
  U64 begin, end;
};

// One block's part of `bytes`: whole packets, but at the end.
__device__ inline Span span_of(U64 bytes, U64 block, U64 blocks) {
  const U64 packets = (bytes + kPacket - 1) / kPacket;
  const U64 end = packets * (block + 1) / blocks * kPacket;
  return {packets * block / blocks * kPacket, end < bytes ? end : bytes};
}

template <class Unit>
__device__ U64 copy_as(char* to, const char* from, U64 bytes) {
  const U64 count = bytes / sizeof(Unit);
  for (U64 i = threadIdx.x; i < count; i += blockDim.x)
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  return count * sizeof(Unit);
}

struct alignas(kPacket) Sixteen {
  U64 low, high;
};

__device__ inline void copy(char* to, const char* from, U64 bytes) {
  const U64 addresses = reinterpret_cast<U64>(to) | reinterpret_cast<U64>(from);
  U64 done = 0;
  if (addresses % kPacket == 0) {
    done = copy_as<Sixteen>(to, from, bytes);
  } else if (addresses % sizeof(U32) == 0) {
    done = copy_as<U32>(to, from, bytes);
  }
  copy_as<char>(to + done, from + done, bytes - done);
}

__device__ inline void copy_part(char* to, const char* from, U64 bytes) {
  const Span part = span_of(bytes, blockIdx.x, gridDim.x);
  if (part.begin < part.end) copy(to + part.begin, from + part.begin, part.end - part.begin);
}

template <class Combine>
__device__ void run(const Round& round, const Combine& combine) {
  const Peers& peers = round.peers;
  const auto meets = [&](U32 sequence) {
    return peers.arrivals == nullptr ? meet(peers, sequence, round.kind)
                                     : has_met(peers, sequence, round.kind);
  };
  if ((round.steps & kArrives) != 0) return arrive(peers, round.sequence, round.kind);
  if ((round.steps & kPutsIn) != 0) {
    // The others may still read what is there.
    if (peers.arrivals != nullptr && *peers.is_over != 0) return;
    char* stage = peers.memory[peers.rank] + round.stage;
    for (int i = 0; i < round.in_count; ++i)
      copy_part(stage + round.in[i].at, round.in[i].own, round.in[i].bytes);
  }
  if ((round.steps & kCombines) != 0) {
    if (!meets(round.sequence)) return;
    if (round.combines != 0) combine(round);
  }
  if ((round.steps & kTakesOut) == 0) return;
  if (round.meets_again != 0 && !meets(round.sequence + 1)) return;
  for (int i = 0; i < round.out_count; ++i) {
    const Piece& piece = round.out[i];
    copy_part(piece.own, peers.memory[piece.from] + round.stage + piece.at, piece.bytes);
  }
}

struct Nothing {
  __device__ void operator()(const Round&) const {}
};

// This lane's part of one chunk.
__device__ inline Span lane_of(const Message& message, U64 chunk, int lane) {
  const U64 begin = chunk * kChunkBytes;
  const U64 left = message.bytes - begin;
  const U64 bytes = left < kChunkBytes ? left : kChunkBytes;
  const Span part = span_of(bytes, static_cast<U64>(lane), kLanes);
  return {begin + part.begin, begin + part.end};
}

__device__ inline bool send(const Peers& peers, const Message& message, int lane) {
  const U64* taken = &flags_of(peers, peers.rank).taken[message.peer][lane];
  U64* ready = flags_of(peers, message.peer).ready[peers.rank][lane];
  const U64 chunks = chunks_of(message.bytes);
  for (U64 chunk = 0; chunk < chunks; ++chunk) {
    const U32 number = message.first + static_cast<U32>(chunk);
    bool is_over = false;
    // The chunk before the last one has to be gone from the slot.
    if (threadIdx.x == 0 && number >= 2)
      is_over = !wait_for<true>(taken, number - 1, peers.is_over);
    if (__syncthreads_or(is_over) != 0) return false;
    const Span part = lane_of(message, chunk, lane);
    copy(peers.memory[peers.rank] + slot_at(message.peer, lane, number % 2),
         message.data + part.begin, part.end - part.begin);
    __syncthreads();
    if (threadIdx.x == 0) store_release(&ready[number % 2], word(number + 1, message.kind));
  }
  return true;
}

__device__ inline bool receive(const Peers& peers, const Message& message, int lane) {
  const U64* ready = flags_of(peers, peers.rank).ready[message.peer][lane];
  U64* taken = &flags_of(peers, message.peer).taken[peers.rank][lane];
  const U64 chunks = chunks_of(message.bytes);
  for (U64 chunk = 0; chunk < chunks; ++chunk) {
    const U32 number = message.first + static_cast<U32>(chunk);
    bool is_over = false;
    if (threadIdx.x == 0)
      is_over = !wait_for<false>(&ready[number % 2], word(number + 1, message.kind), peers.is_over);
    if (__syncthreads_or(is_over) != 0) return false;
    const Span part = lane_of(message, chunk, lane);
    copy(message.data + part.begin,
         peers.memory[message.peer] + slot_at(peers.rank, lane, number % 2), part.end - part.begin);
    __syncthreads();
    if (threadIdx.x == 0) store_release(taken, number + 1);
  }
  return true;
}

// Block (2 * peer + direction) * kLanes + lane, in the messages' order.
__device__ inline void run(const Messages& messages) {
  const int lane = static_cast<int>(blockIdx.x) % kLanes;
  const int sends = static_cast<int>(blockIdx.x) / kLanes % 2;
  const int peer = static_cast<int>(blockIdx.x) / kLanes / 2;
  for (int i = 0; i < messages.count; ++i) {
    const Message& message = messages.all[i];
    if (message.peer != peer || message.sends != sends) continue;
    const bool goes_on =
        sends != 0 ? send(messages.peers, message, lane) : receive(messages.peers, message, lane);
    if (!goes_on) return;
  }
}

// Elements and their arithmetic are those of comm/reduce/kernels.inl, to the bit.

template <class A, class B>
__device__ A bits_as(const B& value) {
  static_assert(sizeof(A) == sizeof(B));
  union {
    B from;
    A to;
  } both{value};
  return both.to;
}

// Floats of 16 and 8 bits are combined in float32 and rounded to nearest even.
struct Half {
  unsigned short bits;
};
struct Brain {
  unsigned short bits;
};
struct E4M3 {
  unsigned char bits;
};
struct E5M2 {
  unsigned char bits;
};
template <class Part>
struct Complex {
  Part real, imaginary;
};

__device__ inline float widen(Half value) {
  const U32 sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  // By a power of two, which is exact: 2^112.
  const float scaled = bits_as<float>(rest << 13) * bits_as<float>(0x77800000u);
  return bits_as<float>(sign | bits_as<U32>(scaled));
}
__device__ inline float widen(Brain value) {
  return bits_as<float>(static_cast<U32>(value.bits) << 16);
}
__device__ inline float widen(E4M3 value) {
  const U32 sign = (value.bits & 0x80u) << 24, rest = value.bits & 0x7fu;
  if (rest == 0x7f) return bits_as<float>(sign | 0x7fc00000u);
  const float scaled = bits_as<float>(rest << 20) * bits_as<float>(0x7b800000u);  // 2^120
  return bits_as<float>(sign | bits_as<U32>(scaled));
}
// The upper byte of a half.
__device__ inline float widen(E5M2 value) {
  return widen(Half{static_cast<unsigned short>(value.bits << 8)});
}

__device__ inline Half narrow(float value, Half) {
  const U32 bits = bits_as<U32>(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  U32 result = rest - 0x38000000 + 0xfff + (rest >> 13 & 1);
  result >>= 13;
  if (rest > 0x7f800000) {
    result = 0x7e00;
  } else if (rest >= 0x477ff000) {
    result = 0x7c00;
  } else if (rest < 0x38800000) {  // adding 0.5 leaves the rounded value in the last bits
    result = bits_as<U32>(bits_as<float>(rest) + 0.5f) - 0x3f000000;
  }
  return {static_cast<unsigned short>(sign | result)};
}
__device__ inline Brain narrow(float value, Brain) {
  const U32 bits = bits_as<U32>(value);
  const U32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<unsigned short>(value != value ? 0x7fc0 : rounded)};
}

template <int mantissa_bits, int bias>
__device__ U32 rounded_to_byte(U32 rest) {
  constexpr U32 kDropped = 23 - mantissa_bits;
  constexpr U32 kLeast = static_cast<U32>(128 - bias) << 23;
  constexpr U32 kShift = static_cast<U32>(128 - bias + 23 - mantissa_bits) << 23;
  if (rest < kLeast) return bits_as<U32>(bits_as<float>(rest) + bits_as<float>(kShift)) - kShift;
  const U32 rebased = rest - (static_cast<U32>(127 - bias) << 23);
  return (rebased + (1u << (kDropped - 1)) - 1 + (rebased >> kDropped & 1)) >> kDropped;
}
__device__ inline E4M3 narrow(float value, E4M3) {
  const U32 bits = bits_as<U32>(value), rest = bits & 0x7fffffff;
  U32 result = 0x7f;
  if (rest <= 0x7f800000) result = rest >= 0x43e00000 ? 0x7e : rounded_to_byte<3, 7>(rest);
  if (rest <= 0x7f800000 && result > 0x7e) result = 0x7e;
  return {static_cast<unsigned char>((bits >> 24 & 0x80) | result)};
}
__device__ inline E5M2 narrow(float value, E5M2) {
  const U32 bits = bits_as<U32>(value), rest = bits & 0x7fffffff;
  U32 result = 0x7f;
  if (rest <= 0x7f800000) result = rest >= 0x47800000 ? 0x7c : rounded_to_byte<2, 15>(rest);
  return {static_cast<unsigned char>((bits >> 24 & 0x80) | result)};
}

// In the order of comm::Combine.
enum Operation : int { Sum, Min, Max, Product, And, Or, Xor };

// The type in which a whole number's sum and product wrap.
template <class T>
struct Wrapping {
  using type = U64;
  static constexpr bool is_whole = true;
};
template <>
struct Wrapping<float> {
  using type = float;
  static constexpr bool is_whole = false;
};
template <>
struct Wrapping<double> {
  using type = double;
  static constexpr bool is_whole = false;
};

template <int operation, class T>
__device__ T combine_plain(T a, T b) {
  using W = typename Wrapping<T>::type;
  if constexpr (operation == Sum) {
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  } else if constexpr (operation == Product) {
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
  } else if constexpr (operation == Min) {
    return a < b || a != a ? a : b;  // a NaN on either side wins
  } else if constexpr (operation == Max) {
    return a > b || a != a ? a : b;
  } else if constexpr (Wrapping<T>::is_whole && operation == And) {
    return static_cast<T>(a & b);
  } else if constexpr (Wrapping<T>::is_whole && operation == Or) {
    return static_cast<T>(a | b);
  } else if constexpr (Wrapping<T>::is_whole && operation == Xor) {
    return static_cast<T>(a ^ b);
  } else {
    return a;
  }
}

template <class T>
struct Arithmetic {
  template <int operation>
  static __device__ T combine(T a, T b) {
    return combine_plain<operation>(a, b);
  }
  static __device__ T divide(T value, int by) {
    if constexpr (Wrapping<T>::is_whole) return static_cast<T>(value / by);
    return static_cast<T>(value / static_cast<T>(by));
  }
};

template <class T>
struct Stored {
  template <int operation>
  static __device__ T combine(T a, T b) {
    return narrow(combine_plain<operation>(widen(a), widen(b)), T{});
  }
  static __device__ T divide(T value, int by) {
    return narrow(widen(value) / static_cast<float>(by), T{});
  }
};
template <>
struct Arithmetic<Half> : Stored<Half> {};
template <>
struct Arithmetic<Brain> : Stored<Brain> {};
template <>
struct Arithmetic<E4M3> : Stored<E4M3> {};
template <>
struct Arithmetic<E5M2> : Stored<E5M2> {};

// Products alone: a sum is one of the parts.
template <class Part>
struct Arithmetic<Complex<Part>> {
  template <int>
  static __device__ Complex<Part> combine(Complex<Part> a, Complex<Part> b) {
    return {a.real * b.real - a.imaginary * b.imaginary,
            a.real * b.imaginary + a.imaginary * b.real};
  }
  static __device__ Complex<Part> divide(Complex<Part> value, int) { return value; }
};

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
  static __device__ Packet<T> at(const Peers& peers, U64 offset) {
    constexpr int left = left_of(count);
    const Packet<T> a = Tree<T, operation, first, left>::at(peers, offset);
    const Packet<T> b = Tree<T, operation, first + left, count - left>::at(peers, offset);
    Packet<T> both;
    for (int i = 0; i < Packet<T>::kCount; ++i)
      both.element[i] = Arithmetic<T>::template combine<operation>(a.element[i], b.element[i]);
    return both;
  }
};
template <class T, int operation, int first>
struct Tree<T, operation, first, 1> {
  static __device__ Packet<T> at(const Peers& peers, U64 offset) {
    return *reinterpret_cast<const Packet<T>*>(peers.memory[first] + offset);
  }
};

template <class T, int operation, int ranks>
struct CombineAll {
  __device__ void operator()(const Round& round) const {
    const Piece& piece = round.combined;
    const Span part = span_of(piece.bytes, blockIdx.x, gridDim.x);
    const bool is_aligned = reinterpret_cast<U64>(piece.own) % kPacket == 0;
    for (U64 at = part.begin + threadIdx.x * kPacket; at < part.end; at += blockDim.x * kPacket) {
      // The last packet may go beyond the piece, but not beyond the stage.
      Packet<T> sum = Tree<T, operation, 0, ranks>::at(round.peers, round.stage + piece.at + at);
      if (round.divide_by != 1) {
        for (int i = 0; i < Packet<T>::kCount; ++i)
          sum.element[i] = Arithmetic<T>::divide(sum.element[i], round.divide_by);
      }
      if (is_aligned && at + kPacket <= part.end) {
        *reinterpret_cast<Packet<T>*>(piece.own + at) = sum;
      } else {
        for (int i = 0; i < Packet<T>::kCount && at + (i + 1) * sizeof(T) <= part.end; ++i)
          reinterpret_cast<T*>(piece.own + at)[i] = sum.element[i];
      }
    }
  }
};

}  // namespace lockstep::comm::cuda_ipc

#ifdef __CUDACC_RTC__
namespace ipc = lockstep::comm::cuda_ipc;
#ifdef LOCKSTEP_ELEMENT
namespace lockstep::comm::cuda_ipc {
using Combine = CombineAll<LOCKSTEP_ELEMENT, LOCKSTEP_COMBINE, LOCKSTEP_RANKS>;
}
extern "C" __global__ void lockstep_combine(const __grid_constant__ ipc::Round round) {
  ipc::run(round, ipc::Combine{});
}
#else
extern "C" __global__ void lockstep_copy(const __grid_constant__ ipc::Round round) {
  ipc::run(round, ipc::Nothing{});
}
extern "C" __global__ void lockstep_message(const __grid_constant__ ipc::Messages messages) {
  ipc::run(messages);
}
#endif
#endif

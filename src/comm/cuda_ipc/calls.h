// What the kernels are called with and how the memory between ranks is laid out, for the host's
// compiler and for NVRTC: it includes nothing.
#pragma once

namespace lockstep::comm::cuda_ipc {

using U32 = unsigned int;
using U64 = unsigned long long;

constexpr int kMaxRanks = 16;
constexpr int kMaxBlocks = 32;
// Blocks that move the messages of one pair of ranks in one direction.
constexpr int kLanes = 4;
constexpr int kMaxMessages = 64;

constexpr U64 kPacket = 16;  // bytes that a thread moves at once
constexpr U64 kStageBytes = U64{8} << 20;
constexpr U64 kSlotBytes = U64{64} << 10;

// Each word of `arrived` and `ready` is a number in a sequence, above, and a hash of the call that
// it belongs to, below: whoever waits for a word waits for exactly this one, so different calls
// never mix. Two of each take turns: a rank writes one again only after it has seen that its last
// value was read.
struct Flags {
  U64 arrived[2][kMaxRanks][kMaxBlocks];  // by who has come there
  U64 ready[kMaxRanks][kLanes][2];        // by sender: the chunk in its slot
  U64 taken[kMaxRanks][kLanes];           // by receiver: how many chunks it has taken
};

// What a rank allocates and all of its host map: the flags, which the others write; the two
// stages, used in turn, and a slot for each receiver's lanes, twice: the others read those.
constexpr U64 kFlagBytes = U64{64} << 10;
static_assert(sizeof(Flags) <= kFlagBytes);
constexpr U64 stage_at(U32 half) { return kFlagBytes + half * kStageBytes; }
constexpr U64 slot_at(int receiver, int lane, U32 half) {
  const U64 before = (static_cast<U64>(receiver) * kLanes + static_cast<U64>(lane)) * 2 + half;
  return stage_at(2) + before * kSlotBytes;
}
constexpr U64 memory_bytes(int size) { return slot_at(size, 0, 0); }

struct Peers {
  char* memory[kMaxRanks];      // each rank's, as this process maps it
  const volatile U32* is_over;  // the host's word that nobody is to wait any more
  int rank;
  int size;
};

// Bytes at `at` of a stage, here and in memory of this rank's own.
struct Piece {
  char* own;
  U64 at;
  U64 bytes;
  int from;  // whose stage it is
};

// As much of a collective as a stage has room for: pieces go into this rank's stage; all ranks
// meet; one piece is combined over all stages; and pieces come out of single ones.
struct Round {
  Peers peers;
  U64 stage;
  U32 sequence;  // of the first time that ranks meet
  U32 kind;      // of the call, alike on all ranks
  int in_count;
  int out_count;
  int combines;     // 0 or 1
  int meets_again;  // 0 or 1: between combining, which is into the stage then, and what comes out
  int divide_by;
  Piece in[kMaxRanks];
  Piece combined;
  Piece out[kMaxRanks];
};

struct Message {
  char* data;
  U64 bytes;
  U32 kind;
  U32 first;  // number of its first chunk among those of this sender and receiver
  int peer;
  int sends;  // 0 or 1
};

// Several at the same time: lane l of what goes to or comes from a rank is a block of its own.
struct Messages {
  Peers peers;
  int count;
  Message all[kMaxMessages];
};

// A chunk is what the lanes' slots hold together.
constexpr U64 kChunkBytes = kLanes * kSlotBytes;
constexpr U64 chunks_of(U64 bytes) {
  return bytes == 0 ? 1 : (bytes + kChunkBytes - 1) / kChunkBytes;
}

}  // namespace lockstep::comm::cuda_ipc

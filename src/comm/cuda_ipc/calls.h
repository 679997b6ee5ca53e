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
// Where ranks take turns on a device, each meeting is dear, and more goes at once: a bucket of Ddp.
constexpr U64 kStageBytes = U64{8} << 20, kTurnBytes = U64{32} << 20;
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

// What a rank allocates and all of its host map: the flags, which the others write; a slot for each
// receiver's lanes, twice, and two stages, used in turn: the others read those.
constexpr U64 kFlagBytes = U64{64} << 10;
static_assert(sizeof(Flags) <= kFlagBytes);
constexpr U64 slot_at(int receiver, int lane, U32 half) {
  const U64 before = (static_cast<U64>(receiver) * kLanes + static_cast<U64>(lane)) * 2 + half;
  return kFlagBytes + before * kSlotBytes;
}
constexpr U64 stage_at(int size, U32 half, U64 stage_bytes) {
  return slot_at(size, 0, 0) + half * stage_bytes;
}
constexpr U64 memory_bytes(int size, U64 stage_bytes) { return stage_at(size, 2, stage_bytes); }

// Where streams wait in place of kernels: a rank's, in memory of the host that all of them map, by
// who has come. Words as in Flags. Each is used again after this many meetings, which is more than
// a driver lets a program enqueue (some thousand launches, of which a meeting has two or three), so
// a rank that is late writes what its own meeting waits for and nothing else.
constexpr U32 kMeetings = 1024;
struct Arrivals {
  U64 arrived[kMaxRanks][kMeetings];
};

struct Peers {
  char* memory[kMaxRanks];      // each rank's, as this process maps it
  const volatile U32* is_over;  // the host's word that nobody is to wait any more
  Arrivals* arrivals;           // by rank, or null where kernels wait
  int rank;
  int size;
};

// What one kernel does of a round: all, or, where streams wait, what lies between two meetings.
// One of those tells the others that this rank has come to the meeting `sequence`.
constexpr U32 kPutsIn = 1, kCombines = 2, kTakesOut = 4, kArrives = 8;

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
  U32 kind;      // of the call, the same on all ranks
  U32 steps;
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

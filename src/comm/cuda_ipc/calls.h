// What the kernels are called with and how the memory between ranks is laid out, for the host's
// compiler and for NVRTC: it includes nothing.
#pragma once

namespace lockstep::comm::cuda_ipc {

using U32 = unsigned int;
using U64 = unsigned long long;

constexpr int kMaxRanks = 16;
constexpr int kMaxBlocks = 64;
constexpr unsigned kThreads = 512;  // of a block
// Blocks that move the messages of one pair of ranks in one direction.
constexpr int kLanes = 4;
// That go with a kernel's arguments; more are read from the host's memory.
constexpr int kMessagesInCall = 64;

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
  U64 where[2][kMaxRanks][kMaxBlocks];    // and where its data are: Round::where
  // This rank's own: the number of barriers that each block has passed; whether a kernel has ended
  // before its barrier because the group failed, after which later kernels do nothing, or a rank
  // that is late would read their data in the place of its own call's; and, where streams wait, the
  // last barrier that all ranks have reached.
  U32 met[kMaxBlocks];
  U32 aborted;
  U32 passed;
  // Where kernels wait, what comes next is counted here and not by the host, so that a CUDA graph
  // that is launched again goes on from where the last call was: rounds, of which each takes the
  // other stage; chunks sent and received, by peer; and the blocks that have left this kernel.
  U32 rounds;
  U32 left;
  U64 sent[kMaxRanks][kLanes];
  U64 received[kMaxRanks][kLanes];
  U64 ready[kMaxRanks][kLanes][2];  // by sender: the chunk in its slot
  U64 taken[kMaxRanks][kLanes];     // by receiver: how many chunks it has taken
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

// In memory of the host's that kernels write: the captured call whose kernel runs, or 0; how many
// such kernels have ended, and how many of these were collectives.
struct Replays {
  U32 running;
  U32 ended;
  U32 collectives;
};

struct Peers {
  char* memory[kMaxRanks];      // each rank's, as this process maps it
  const volatile U32* is_over;  // the host's word that nobody is to wait any more
  volatile Replays* replays;
  Arrivals* arrivals;  // by rank, or null where kernels wait
  int rank;
  int size;
};

// What one kernel does of a round where streams wait: what lies between two meetings; or it tells
// the others that this rank has come to a meeting; or it looks, when the stream has waited, whether
// they have, for the same call. The last two read and write the host's memory, which takes a
// microsecond or two for each group of threads, so they have as few of them as there can be.
constexpr U32 kPutsIn = 1, kCombines = 2, kTakesOut = 4, kArrives = 8, kChecks = 16;
constexpr unsigned kFewThreads = 32;

// Memory of this rank's own, of which a slot of a stage holds as much as a round has room for.
struct Piece {
  char* own;  // null: what is combined goes into the slot itself
  U64 bytes;
  U64 slot;  // where it begins in a stage
  int from;  // whose stage it is
};

// This rank's part of a tensor that each rank has in memory which all of them map: no stage is
// needed. It is read from all ranks' tensors, or written to them, or both.
struct Direct {
  char* part[kMaxRanks];  // by rank, as this process maps it
  U64 bytes;
  char* own;   // what is not shared: where it is written to, or read from
  int reads;   // 0 or 1: from all, and combined
  int writes;  // 0 or 1: to all
};

// Rounds of a collective, of which each takes as much as a stage has room for: pieces go into this
// rank's stage; all ranks meet; one piece is combined over all stages; and pieces come out of
// single ones. Where kernels wait, one of them does all rounds.
struct Round {
  Peers peers;
  U64 stages, stage_bytes;  // where the first of the two begins; the other follows it
  U64 begin, room;          // bytes of each piece that are done; that go at once
  U32 rounds;
  U32 stage;     // where streams wait, 0 or 1: the first round's
  U32 sequence;  // where streams wait: of the meeting that this is, or that this follows
  U32 kind;      // of the call, the same on all ranks
  U32 captured;  // its number among those in CUDA graphs, from 1; or 0
  U32 steps;
  int in_count;
  int out_count;
  int combines;     // 0 or 1
  int meets_again;  // 0 or 1: between combining, which is into the stage then, and what comes out
  int divide_by;
  // Whether the call can go without stages: which of the memories that all map, and where in it;
  // 0 when it cannot. It does if all ranks say the same.
  U64 where;
  Direct direct;
  Piece in[kMaxRanks];
  Piece combined;
  Piece out[kMaxRanks];
};
constexpr U64 where_of(U32 memory, U64 offset) {
  return static_cast<U64>(memory) << 40 | offset / kPacket;
}

struct Message {
  char* data;
  U64 bytes;
  U32 kind;
  int peer;
  int sends;  // 0 or 1
};

// Several at the same time: lane l of what goes to or comes from a rank is a block of its own.
struct Messages {
  Peers peers;
  U32 captured;  // as a round's
  int count;
  const Message* more;  // all of them, where they are more than have room here; or null
  Message all[kMessagesInCall];
};

// A chunk is what the lanes' slots hold together.
constexpr U64 kChunkBytes = kLanes * kSlotBytes;
constexpr U64 chunks_of(U64 bytes) {
  return bytes == 0 ? 1 : (bytes + kChunkBytes - 1) / kChunkBytes;
}

}  // namespace lockstep::comm::cuda_ipc

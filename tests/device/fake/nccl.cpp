// A library with NCCL's symbols for the fake device: what a test's ranks load in its place. Calls
// are enqueued on the fake streams and move real data between the processes.
//   FAKE_NCCL_VERSION=21300     what ncclGetVersion says
//   FAKE_NCCL_ASYNC_ERROR=3     from the third group of calls on ncclCommGetAsyncError reports an
//   error
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "comm/nccl/api.h"
#include "device/fake/stream.h"
#include "device/fake/wire.h"

namespace nccl = lockstep::comm::nccl;
using lockstep::test::fake::FakeWire;
using lockstep::test::fake::Move;

struct lockstep::comm::nccl::Communicator {
  Communicator(const std::string& name, int rank, int size) : wire(name, rank, size) {}
  FakeWire wire;
  std::atomic<bool> aborted{false};
  std::atomic<bool> busy{false};  // says once that a group of calls is in progress
  int groups = 0;
};

namespace {

using nccl::Communicator;
using nccl::DataType;
using nccl::RedOp;
using nccl::Result;

// Messages run at the same time, collectives one after another.
struct Group {
  int depth = 0;
  Communicator* comm = nullptr;
  FakeStreamHandle* stream = nullptr;
  std::vector<Move> messages;
  std::vector<std::function<bool()>> collectives;
};
thread_local Group group;
std::atomic<int64_t> registered{0}, allocations{0};

size_t size_of(DataType type) {
  switch (type) {
    case nccl::Int8:
    case nccl::Uint8:
      return 1;
    case nccl::Float16:
    case nccl::Bfloat16:
      return 2;
    case nccl::Int32:
    case nccl::Float32:
      return 4;
    default:
      return 8;
  }
}

template <class T>
void scale(char* data, size_t count, int size) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  for (T* at = reinterpret_cast<T*>(data); count-- > 0; ++at)
    *at = static_cast<T>(static_cast<Wide>(*at) * (Wide(1) / static_cast<Wide>(size)));
}

template <class T>
void fold(char* to, const char* from, size_t count, RedOp op) {
  T* a = reinterpret_cast<T*>(to);
  const T* b = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) {
    switch (op) {
      case nccl::Prod:
        a[i] = static_cast<T>(a[i] * b[i]);
        break;
      // As NCCL's: a NaN loses.
      case nccl::Max:
        a[i] = a[i] != a[i] || b[i] > a[i] ? b[i] : a[i];
        break;
      case nccl::Min:
        a[i] = a[i] != a[i] || b[i] < a[i] ? b[i] : a[i];
        break;
      default:
        a[i] = static_cast<T>(a[i] + b[i]);
    }
  }
}

template <class Call>
void with_type(DataType type, const Call& call) {
  switch (type) {
    case nccl::Int8:
      return call(int8_t{});
    case nccl::Uint8:
      return call(uint8_t{});
    case nccl::Int32:
      return call(int32_t{});
    case nccl::Int64:
      return call(int64_t{});
    case nccl::Float16:
      return call(c10::Half{});
    case nccl::Bfloat16:
      return call(c10::BFloat16{});
    case nccl::Float32:
      return call(float{});
    case nccl::Float64:
      return call(double{});
  }
}

uint64_t kind_of(int what, int type, int op, int root) {
  return what | type << 8 | op << 16 | uint64_t(root) << 24;
}

// Every rank's part of an element is added in the order of ranks.
bool reduce(Communicator* comm, const char* in, char* out, size_t count, DataType type, RedOp op,
            const std::vector<int>& to, uint64_t kind) {
  FakeWire& wire = comm->wire;
  const size_t bytes = count * size_of(type);
  std::vector<std::vector<char>> parts(wire.size());
  std::vector<Move> moves;
  std::vector<char> own(in, in + bytes);
  if (op == nccl::Avg)
    with_type(type, [&](auto t) { scale<decltype(t)>(own.data(), count, wire.size()); });
  const bool receives = std::find(to.begin(), to.end(), wire.rank()) != to.end();
  for (int peer = 0; peer < wire.size(); ++peer) {
    if (peer == wire.rank()) continue;
    if (std::find(to.begin(), to.end(), peer) != to.end())
      moves.push_back({true, peer, own.data(), bytes, kind});
    if (!receives) continue;
    parts[peer].resize(bytes);
    moves.push_back({false, peer, parts[peer].data(), bytes, kind});
  }
  if (!wire.run(std::move(moves), comm->aborted)) return false;
  if (!receives) return true;
  parts[wire.rank()] = own;
  for (int rank = 1; rank < wire.size(); ++rank) {
    with_type(type,
              [&](auto t) { fold<decltype(t)>(parts[0].data(), parts[rank].data(), count, op); });
  }
  std::memcpy(out, parts[0].data(), bytes);
  return true;
}

std::vector<int> everybody(const Communicator* comm) {
  std::vector<int> ranks(comm->wire.size());
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<int>(r);
  return ranks;
}

void add(Communicator* comm, nccl::Stream stream) {
  group.comm = comm;
  group.stream = static_cast<FakeStreamHandle*>(stream);
}

Result add(Communicator* comm, nccl::Stream stream, std::function<bool()> collective) {
  if (group.depth == 0) return nccl::InvalidUsage;
  add(comm, stream);
  group.collectives.push_back(std::move(collective));
  return nccl::Success;
}

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) {
  const char* said = std::getenv("FAKE_NCCL_VERSION");
  *version = said != nullptr ? std::atoi(said) : 23007;
  return nccl::Success;
}

Result ncclGetUniqueId(nccl::UniqueId* id) {
  static int count = 0;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  std::snprintf(id->internal, sizeof id->internal, "%d-%d-%ld", getpid(), ++count, now.tv_nsec);
  return nccl::Success;
}

Result ncclCommInitRankConfig(Communicator** comm, int size, nccl::UniqueId id, int rank,
                              nccl::Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0) return nccl::InvalidArgument;
  *comm = new Communicator(id.internal, rank, size);
  return nccl::InProgress;
}

Result ncclCommFinalize(Communicator*) { return nccl::Success; }

Result ncclCommDestroy(Communicator* comm) {
  delete comm;
  return nccl::Success;
}

// What is in the stream may still look at it.
Result ncclCommAbort(Communicator* comm) {
  comm->aborted = true;
  return nccl::Success;
}

Result ncclCommGetAsyncError(Communicator* comm, Result* error) {
  *error = !comm->wire.all_here() || comm->busy.exchange(false) ? nccl::InProgress : nccl::Success;
  const char* from = std::getenv("FAKE_NCCL_ASYNC_ERROR");
  if (from != nullptr && comm->groups >= std::atoi(from)) *error = nccl::RemoteError;
  return nccl::Success;
}

const char* ncclGetErrorString(Result result) {
  return result == nccl::RemoteError ? "remote process exited" : "error";
}
const char* ncclGetLastError(Communicator*) { return "told by FAKE_NCCL_ASYNC_ERROR"; }

Result ncclGroupStart() {
  ++group.depth;
  return nccl::Success;
}

Result ncclGroupEnd() {
  if (--group.depth > 0) return nccl::Success;
  auto* work = new Group(std::move(group));
  group = {};
  if (work->comm == nullptr) return delete work, nccl::Success;
  ++work->comm->groups;
  work->comm->busy = true;
  work->stream->enqueue_communication(
      work->stream,
      [](void* argument) {
        auto* own = static_cast<Group*>(argument);
        bool good = own->comm->wire.run(own->messages, own->comm->aborted);
        for (const auto& collective : own->collectives) good = good && collective();
      },
      work, [](void* argument) { delete static_cast<Group*>(argument); });
  return nccl::InProgress;
}

Result ncclAllReduce(const void* in, void* out, size_t count, DataType type, RedOp op,
                     Communicator* comm, nccl::Stream stream) {
  return add(comm, stream, [=] {
    return reduce(comm, static_cast<const char*>(in), static_cast<char*>(out), count, type, op,
                  everybody(comm), kind_of(1, type, op, 0));
  });
}

Result ncclReduce(const void* in, void* out, size_t count, DataType type, RedOp op, int root,
                  Communicator* comm, nccl::Stream stream) {
  return add(comm, stream, [=] {
    return reduce(comm, static_cast<const char*>(in), static_cast<char*>(out), count, type, op,
                  {root}, kind_of(2, type, op, root));
  });
}

Result ncclReduceScatter(const void* in, void* out, size_t count, DataType type, RedOp op,
                         Communicator* comm, nccl::Stream stream) {
  return add(comm, stream, [=] {
    bool good = true;
    for (int root = 0; root < comm->wire.size(); ++root) {
      good = good &&
             reduce(comm, static_cast<const char*>(in) + root * count * size_of(type),
                    static_cast<char*>(out), count, type, op, {root}, kind_of(3, type, op, root));
    }
    return good;
  });
}

Result ncclBroadcast(const void* in, void* out, size_t count, DataType type, int root,
                     Communicator* comm, nccl::Stream stream) {
  return add(comm, stream, [=] {
    const FakeWire& wire = comm->wire;
    const size_t bytes = count * size_of(type);
    std::vector<Move> moves;
    for (int peer = 0; peer < wire.size(); ++peer) {
      if (wire.rank() == root && peer != root) {
        moves.push_back({true, peer, const_cast<char*>(static_cast<const char*>(in)), bytes,
                         kind_of(4, type, 0, root)});
      }
    }
    if (wire.rank() != root)
      moves.push_back({false, root, static_cast<char*>(out), bytes, kind_of(4, type, 0, root)});
    if (wire.rank() == root && in != out) std::memcpy(out, in, bytes);
    return comm->wire.run(std::move(moves), comm->aborted);
  });
}

Result ncclAllGather(const void* in, void* out, size_t count, DataType type, Communicator* comm,
                     nccl::Stream stream) {
  const size_t bytes = count * size_of(type);
  Result result = nccl::Success;
  for (int root = 0; root < comm->wire.size(); ++root) {
    result =
        ncclBroadcast(in, static_cast<char*>(out) + root * bytes, count, type, root, comm, stream);
  }
  return result;
}

Result ncclSend(const void* data, size_t count, DataType type, int peer, Communicator* comm,
                nccl::Stream stream) {
  add(comm, stream);
  group.messages.push_back({true, peer, const_cast<char*>(static_cast<const char*>(data)),
                            count * size_of(type), kind_of(5, type, 0, 0)});
  return nccl::Success;
}

Result ncclRecv(void* data, size_t count, DataType type, int peer, Communicator* comm,
                nccl::Stream stream) {
  add(comm, stream);
  group.messages.push_back(
      {false, peer, static_cast<char*>(data), count * size_of(type), kind_of(5, type, 0, 0)});
  return nccl::Success;
}

Result ncclCommRegister(Communicator*, void*, size_t bytes, void** handle) {
  registered += static_cast<int64_t>(bytes);
  *handle = new int64_t(static_cast<int64_t>(bytes));
  return nccl::Success;
}

Result ncclCommDeregister(Communicator*, void* handle) {
  const std::unique_ptr<int64_t> bytes(static_cast<int64_t*>(handle));
  registered -= *bytes;
  return nccl::Success;
}

Result ncclMemAlloc(void** memory, size_t bytes) {
  if (posix_memalign(memory, 4096, bytes) != 0) return nccl::SystemError;
  ++allocations;
  return nccl::Success;
}

Result ncclMemFree(void* memory) {
  std::free(memory);
  --allocations;
  return nccl::Success;
}

// Bytes that are registered now, and blocks that are allocated; for tests.
int64_t fakeNcclRegistered() { return registered; }
int64_t fakeNcclAllocations() { return allocations; }

}  // extern "C"

// NCCL's C interface, found at run time: nothing here links to NCCL or CUDA. The declarations are
// those of nccl.h 2.14 to 2.30, which keeps them stable; tests/device/nccl/header_test.cpp
// compares.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

namespace lockstep::comm::nccl {

struct Communicator;   // opaque
using Stream = void*;  // a cudaStream_t

struct UniqueId {
  char internal[128];
};

enum Result : int {
  Success = 0,
  UnhandledCudaError = 1,
  SystemError = 2,
  InternalError = 3,
  InvalidArgument = 4,
  InvalidUsage = 5,
  RemoteError = 6,
  InProgress = 7,
};

enum DataType : int {
  Int8 = 0,
  Uint8 = 1,
  Int32 = 2,
  Int64 = 4,
  Float16 = 6,
  Float32 = 7,
  Float64 = 8,
  Bfloat16 = 9,
};

enum RedOp : int { Sum = 0, Prod = 1, Max = 2, Min = 3, Avg = 4 };

// As of 2.14: later versions read `size` bytes and take defaults for what they have added since.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
  int unset = INT_MIN;
};

// The functions of one library, named as there without "nccl". Those marked optional may be null.
struct Api {
  std::string path;  // of the library's file
  int version = 0;   // 23007 is 2.30.7

  Result (*GetVersion)(int*);
  Result (*GetUniqueId)(UniqueId*);
  Result (*CommInitRankConfig)(Communicator**, int, UniqueId, int, Config*);
  Result (*CommFinalize)(Communicator*);
  Result (*CommDestroy)(Communicator*);
  Result (*CommAbort)(Communicator*);
  Result (*CommGetAsyncError)(Communicator*, Result*);
  const char* (*GetErrorString)(Result);
  const char* (*GetLastError)(Communicator*);
  Result (*GroupStart)();
  Result (*GroupEnd)();
  Result (*AllReduce)(const void*, void*, size_t, DataType, RedOp, Communicator*, Stream);
  Result (*Reduce)(const void*, void*, size_t, DataType, RedOp, int, Communicator*, Stream);
  Result (*ReduceScatter)(const void*, void*, size_t, DataType, RedOp, Communicator*, Stream);
  Result (*AllGather)(const void*, void*, size_t, DataType, Communicator*, Stream);
  Result (*Broadcast)(const void*, void*, size_t, DataType, int, Communicator*, Stream);
  Result (*Send)(const void*, size_t, DataType, int, Communicator*, Stream);
  Result (*Recv)(void*, size_t, DataType, int, Communicator*, Stream);
  // Optional: since 2.19.
  Result (*CommRegister)(Communicator*, void*, size_t, void**);
  Result (*CommDeregister)(Communicator*, void*);
  Result (*MemAlloc)(void**, size_t);
  Result (*MemFree)(void*);
};

// Opens the library, once for the process: the file that LOCKSTEP_NCCL names; or the one that
// libtorch's wheel brings (nvidia/nccl/lib beside torch); or the one that the dynamic loader finds
// as libnccl.so.2. Throws ConfigError that names the file and what it lacks.
const Api& load();

// "2.30.7".
std::string version_text(int version);

}  // namespace lockstep::comm::nccl

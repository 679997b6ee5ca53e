// CUDA's driver and its run-time compiler, NVRTC, found at run time: nothing here links to them.
// The declarations are those of cuda.h and nvrtc.h 10.2 to 13;
// tests/device/cuda_ipc/header_test.cpp compares.
#pragma once

#include <cstddef>
#include <string>

namespace lockstep::comm::cuda_ipc {

using Address = unsigned long long;  // in the device's address space
using Device = int;
using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;
using Memory = unsigned long long;  // physical, which addresses are mapped to
using Program = void*;              // NVRTC's

enum Attribute : int {
  SharesByDescriptor = 103,  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
  Multiprocessors = 16,
  MajorVersion = 75,  // of what it can compute
  MinorVersion = 76,
  WaitsFor64Bits = 122,  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, of streams
  HasMps = 133,          // CU_DEVICE_ATTRIBUTE_MPS_ENABLED: processes compute at the same time
};

constexpr int kPinned = 1;           // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kDescriptor = 1;       // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kOnDevice = 1;         // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadAndWrite = 3;     // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr unsigned kMappedHost = 3;  // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned kRegistered = 3;  // the same for CU_MEMHOSTREGISTER
constexpr unsigned kAtLeast = 0;     // CU_STREAM_WAIT_VALUE_GEQ

struct Location {
  int type = kOnDevice;
  int id = 0;
};
struct Properties {
  int type = kPinned;
  int handles = kDescriptor;
  Location location;
  void* reserved = nullptr;
  unsigned char flags[8] = {};
};
struct Access {
  Location location;
  int flags = kReadAndWrite;
};
struct Uuid {
  unsigned char bytes[16] = {};
  bool operator==(const Uuid&) const = default;
};

// Named as there without "cu".
struct Driver {
  std::string path;  // of the library's file

  int (*Init)(unsigned);
  int (*GetErrorString)(int, const char**);
  int (*DeviceGet)(Device*, int);
  int (*DeviceGetAttribute)(int*, int, Device);
  int (*DevicePrimaryCtxRetain)(Context*, Device);
  int (*DevicePrimaryCtxRelease)(Device);
  int (*CtxPushCurrent)(Context);
  int (*CtxPopCurrent)(Context*);
  int (*MemGetAllocationGranularity)(size_t*, const Properties*, int);
  int (*MemCreate)(Memory*, size_t, const Properties*, unsigned long long);
  int (*MemRelease)(Memory);
  int (*MemExportToShareableHandle)(void*, Memory, int, unsigned long long);
  int (*MemImportFromShareableHandle)(Memory*, void*, int);
  int (*MemAddressReserve)(Address*, size_t, size_t, Address, unsigned long long);
  int (*MemAddressFree)(Address, size_t);
  int (*MemMap)(Address, size_t, size_t, Memory, unsigned long long);
  int (*MemUnmap)(Address, size_t);
  int (*MemSetAccess)(Address, size_t, const Access*, size_t);
  int (*MemsetD8)(Address, unsigned char, size_t);
  int (*MemHostAlloc)(void**, size_t, unsigned);
  int (*MemHostGetDevicePointer)(Address*, void*, unsigned);
  int (*MemFreeHost)(void*);
  int (*ModuleLoadData)(Module*, const void*);
  int (*ModuleUnload)(Module);
  int (*ModuleGetFunction)(Function*, Module, const char*);
  int (*LaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, Stream, void**, void**);
  int (*StreamSynchronize)(Stream);

  // With these streams wait for words in memory; null where the driver is older than CUDA 11.7.
  int (*DeviceGetUuid)(Uuid*, Device);
  int (*MemHostRegister)(void*, size_t, unsigned);
  int (*MemHostUnregister)(void*);
  int (*StreamWaitValue64)(Stream, Address, unsigned long long, unsigned);
  bool has_waiting_streams() const {
    return DeviceGetUuid != nullptr && MemHostRegister != nullptr && MemHostUnregister != nullptr &&
           StreamWaitValue64 != nullptr;
  }
};

// Named as there without "nvrtc".
struct Compiler {
  std::string path;

  const char* (*GetErrorString)(int);
  int (*CreateProgram)(Program*, const char*, const char*, int, const char* const*,
                       const char* const*);
  int (*DestroyProgram)(Program*);
  int (*CompileProgram)(Program, int, const char* const*);
  int (*GetProgramLogSize)(Program, size_t*);
  int (*GetProgramLog)(Program, char*);
  int (*GetCUBINSize)(Program, size_t*);
  int (*GetCUBIN)(Program, char*);
};

// Opens libcuda.so.1, or what LOCKSTEP_CUDA_DRIVER names, once for the process. Throws ConfigError
// that names the file and what it lacks.
const Driver& driver();
// The same for NVRTC: the file that LOCKSTEP_NVRTC names; or the one that libtorch's wheel brings
// (in nvidia/ beside torch); or whatever the loader finds.
const Compiler& compiler();

// Throws CommError, which says what the driver says, unless `result` is 0.
void check(int result, const char* call);

}  // namespace lockstep::comm::cuda_ipc

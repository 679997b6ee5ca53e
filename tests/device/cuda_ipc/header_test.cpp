// Our declarations of CUDA's driver and NVRTC are those of their headers, and NVRTC compiles the
// kernels for GPUs; where the toolkit is installed.
#include <cuda.h>
#include <gtest/gtest.h>
#include <nvrtc.h>

#include <cstdlib>
#include <type_traits>

#include "comm/cuda_ipc/api.h"
#include "comm/cuda_ipc/calls.h"
#include "comm/cuda_ipc/kernels.h"
#include "support/fork.h"

namespace lockstep::comm::cuda_ipc {
namespace {

static_assert(int{SharesByDescriptor} ==
                  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED &&
              int{Multiprocessors} == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT &&
              int{MajorVersion} == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR &&
              int{MinorVersion} == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR &&
              int{WaitsFor64Bits} == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS &&
              int{HasMps} == CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
static_assert(kPinned == CU_MEM_ALLOCATION_TYPE_PINNED &&
              kDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
              kOnDevice == CU_MEM_LOCATION_TYPE_DEVICE &&
              kReadAndWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE &&
              kMappedHost == (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) &&
              kRegistered == (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) &&
              kAtLeast == CU_STREAM_WAIT_VALUE_GEQ && sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(Properties) == sizeof(CUmemAllocationProp) &&
              offsetof(Properties, handles) ==
                  offsetof(CUmemAllocationProp, requestedHandleTypes) &&
              offsetof(Properties, location) == offsetof(CUmemAllocationProp, location) &&
              offsetof(Properties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(Access) == sizeof(CUmemAccessDesc) &&
              offsetof(Access, flags) == offsetof(CUmemAccessDesc, flags));
// What a kernel is called with has 4 KiB, on every GPU and with every driver.
static_assert(sizeof(Round) <= 4096 && sizeof(Messages) <= 4096);

// Whether two types go through a C call alike: both pointers, or both integers of one size.
template <class A, class B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_class_v<A> == std::is_class_v<B>;

template <class A, class B>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
requires(sizeof...(A) == sizeof...(B)) struct SameCall<R (*)(A...), S (*)(B...)>
    : std::bool_constant<alike<R, S> && (alike<A, B> && ...)> {
};

#define EXPECT_SAME(name) \
  static_assert(SameCall<decltype(Driver::name), decltype(&cu##name)>::value)
EXPECT_SAME(Init);
EXPECT_SAME(GetErrorString);
EXPECT_SAME(DeviceGet);
EXPECT_SAME(DeviceGetAttribute);
EXPECT_SAME(DevicePrimaryCtxRetain);
EXPECT_SAME(DevicePrimaryCtxRelease);
EXPECT_SAME(CtxPushCurrent);
EXPECT_SAME(CtxPopCurrent);
EXPECT_SAME(MemGetAllocationGranularity);
EXPECT_SAME(MemCreate);
EXPECT_SAME(MemRelease);
EXPECT_SAME(MemExportToShareableHandle);
EXPECT_SAME(MemImportFromShareableHandle);
EXPECT_SAME(MemAddressReserve);
EXPECT_SAME(MemAddressFree);
EXPECT_SAME(MemMap);
EXPECT_SAME(MemUnmap);
EXPECT_SAME(MemSetAccess);
EXPECT_SAME(MemsetD8);
EXPECT_SAME(MemHostAlloc);
EXPECT_SAME(MemHostGetDevicePointer);
EXPECT_SAME(MemFreeHost);
EXPECT_SAME(ModuleLoadData);
EXPECT_SAME(ModuleUnload);
EXPECT_SAME(ModuleGetFunction);
EXPECT_SAME(LaunchKernel);
EXPECT_SAME(StreamSynchronize);
EXPECT_SAME(DeviceGetUuid);
EXPECT_SAME(MemHostRegister);
EXPECT_SAME(MemHostUnregister);
EXPECT_SAME(StreamWaitValue64);

#define EXPECT_SAME_NVRTC(name) \
  static_assert(SameCall<decltype(Compiler::name), decltype(&nvrtc##name)>::value)
EXPECT_SAME_NVRTC(GetErrorString);
EXPECT_SAME_NVRTC(CreateProgram);
EXPECT_SAME_NVRTC(DestroyProgram);
EXPECT_SAME_NVRTC(CompileProgram);
EXPECT_SAME_NVRTC(GetProgramLogSize);
EXPECT_SAME_NVRTC(GetProgramLog);
EXPECT_SAME_NVRTC(GetCUBINSize);
EXPECT_SAME_NVRTC(GetCUBIN);

constexpr Element kElements[] = {Element::Float32,   Element::Float64,    Element::Float16,
                                 Element::BFloat16,  Element::Int8,       Element::Int16,
                                 Element::Int32,     Element::Int64,      Element::UInt8,
                                 Element::Bool,      Element::UInt16,     Element::UInt32,
                                 Element::UInt64,    Element::Float8E4M3, Element::Float8E5M2,
                                 Element::Complex64, Element::Complex128};

void compile_all() {
  for (const int version : {80, 90}) {
    EXPECT_FALSE(compile(version, {}).empty());
    EXPECT_FALSE(compile(version, defines_of({}, 8)).empty());
  }
  // Every element once; operations change nothing but one expression.
  for (const Element element : kElements) {
    const bool is_complex = element == Element::Complex64 || element == Element::Complex128;
    const Combine combine = is_complex ? Combine::Product : Combine::Sum;
    EXPECT_EQ(compile(90, defines_of({element, combine, 2}, 2)).substr(1, 3), "ELF");
  }
  for (const Combine combine :
       {Combine::Min, Combine::Max, Combine::Product, Combine::And, Combine::Or, Combine::Xor}) {
    EXPECT_FALSE(compile(80, defines_of({Element::Int32, combine}, 3)).empty());
  }
}

TEST(CudaIpcKernels, CompileForGpus) {
  // The other tests of this program need the fake compiler, and a process loads only one.
  constexpr unsigned kSeconds = 300;
  test::in_a_child(
      [] {
        setenv("LOCKSTEP_NVRTC", REAL_NVRTC, 1);
        compile_all();
      },
      kSeconds);
}

}  // namespace
}  // namespace lockstep::comm::cuda_ipc

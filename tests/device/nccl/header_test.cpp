// Our declarations of NCCL are those of its header, where that is installed.
#include <gtest/gtest.h>
#include <nccl.h>

#include <type_traits>

#include "comm/nccl/api.h"

namespace lockstep::comm::nccl {
namespace {

static_assert(int{Success} == ncclSuccess && int{SystemError} == ncclSystemError &&
              int{RemoteError} == ncclRemoteError && int{InProgress} == ncclInProgress &&
              int{UnhandledCudaError} == ncclUnhandledCudaError &&
              int{InternalError} == ncclInternalError &&
              int{InvalidArgument} == ncclInvalidArgument && int{InvalidUsage} == ncclInvalidUsage);
static_assert(int{Int8} == ncclInt8 && int{Uint8} == ncclUint8 && int{Int32} == ncclInt32 &&
              int{Int64} == ncclInt64 && int{Float16} == ncclFloat16 &&
              int{Float32} == ncclFloat32 && int{Float64} == ncclFloat64 &&
              int{Bfloat16} == ncclBfloat16);
static_assert(int{Sum} == ncclSum && int{Prod} == ncclProd && int{Max} == ncclMax &&
              int{Min} == ncclMin && int{Avg} == ncclAvg);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) &&
              alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(Config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking) &&
              sizeof(Config) <= sizeof(ncclConfig_t));

// Whether two types go through a C call alike: both pointers, or both integers or structs of one
// size.
template <class A, class B>
constexpr bool alike = std::is_pointer_v<A> == std::is_pointer_v<B> &&
                       sizeof(A) == sizeof(B) && std::is_class_v<A> == std::is_class_v<B>;

template <class A, class B>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
requires(sizeof...(A) == sizeof...(B)) struct SameCall<R (*)(A...), S (*)(B...)>
    : std::bool_constant<alike<R, S> && (alike<A, B> && ...)> {
};

#define EXPECT_SAME(name) static_assert(SameCall<decltype(Api::name), decltype(&nccl##name)>::value)
EXPECT_SAME(GetVersion);
EXPECT_SAME(GetUniqueId);
EXPECT_SAME(CommInitRankConfig);
EXPECT_SAME(CommFinalize);
EXPECT_SAME(CommDestroy);
EXPECT_SAME(CommAbort);
EXPECT_SAME(CommGetAsyncError);
EXPECT_SAME(GetErrorString);
EXPECT_SAME(GetLastError);
EXPECT_SAME(GroupStart);
EXPECT_SAME(GroupEnd);
EXPECT_SAME(AllReduce);
EXPECT_SAME(Reduce);
EXPECT_SAME(ReduceScatter);
EXPECT_SAME(AllGather);
EXPECT_SAME(Broadcast);
EXPECT_SAME(Send);
EXPECT_SAME(Recv);
EXPECT_SAME(CommRegister);
EXPECT_SAME(CommDeregister);
EXPECT_SAME(MemAlloc);
EXPECT_SAME(MemFree);

TEST(NcclHeader, ConfigHasTheMarkOfItsOwn) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(Config().magic, theirs.magic);
  EXPECT_LE(Config().version, theirs.version);
}

}  // namespace
}  // namespace lockstep::comm::nccl

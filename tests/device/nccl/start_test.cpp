// Which device a rank gets, and what it says when it cannot have one.
#include <dlfcn.h>

#include <map>

#include "comm/host/libraries.h"
#include "device/failures.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

using Environment = std::map<std::string, std::string>;

const Environment kFake{{"LOCKSTEP_DEVICE", "privateuseone"}, {"LOCKSTEP_NCCL", FAKE_NCCL}};

Environment fake_with(Environment more) {
  more.insert(kFake.begin(), kFake.end());
  return more;
}

// What World::from_env() throws on each of two ranks, which `of` gives its variables.
void expect_refusal(const std::function<Environment(int)>& of,
                    const testing::Matcher<const std::string&>& said) {
  spawn_bare(2, [&](int rank) {
    for (const auto& [name, value] : of(rank)) setenv(name.c_str(), value.c_str(), 1);
    EXPECT_THAT(message_of([] { World::from_env({.timeout = std::chrono::seconds(60)}); }), said)
        << "rank " << rank;
  });
}

TEST(NcclStart, RanksTakeTheDevicesOfTheirLocalRanks) {
  spawn_on_device(3, [](World& world) {
    EXPECT_EQ(world.device(),
              at::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(world.rank())));
    EXPECT_EQ(fake::current_stream().device(), world.device());
    EXPECT_THAT(world.describe(), HasSubstr("3 ranks on 1 host, nccl, "));
    EXPECT_TRUE(world.group().carries(world.device()));
    EXPECT_TRUE(world.group().carries(at::kCPU));
    EXPECT_FALSE(world.group().carries(at::kMeta));
    EXPECT_FALSE(world.group().deterministic());
  });
}

TEST(NcclStart, ARankThatSeesOneDeviceTakesIt) {
  setenv("FAKE_DEVICES", "1", 1);
  setenv("CUDA_VISIBLE_DEVICES", "3", 1);
  spawn_on_device(2, [](World& world) {
    EXPECT_EQ(world.device().index(), 0);
    at::Tensor data = at::ones({4}).to(world.device());
    world.group().all_reduce(data).wait();
    EXPECT_EQ(data.cpu().sum().item<float>(), 8);
  });
  unsetenv("FAKE_DEVICES");
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(NcclStart, AWorldOfOneHasADeviceAndNeedsNoLibrary) {
  spawn_bare(1, [](int) {
    setenv("LOCKSTEP_DEVICE", "privateuseone", 1);
    const World world = World::from_env();
    EXPECT_EQ(world.device(), fake::device());
    at::Tensor data = at::ones({4}).to(world.device());
    world.group().all_reduce(data).wait();
    EXPECT_EQ(data.cpu().sum().item<float>(), 4);
    EXPECT_THAT(maps(), Not(HasSubstr("nccl")));
  });
}

TEST(NcclStart, TooFewDevicesAreCounted) {
  expect_refusal(
      [](int) {
        return fake_with({{"FAKE_DEVICES", "1"}});
      },
      AllOf(HasSubstr("2 ranks on this host, but 1 privateuseone device: local rank 1 has none"),
            HasSubstr("(rank 1)")));
}

TEST(NcclStart, RanksOnDifferentDevicesAreNamed) {
  expect_refusal(
      [](int rank) {
        return fake_with({{rank == 1 ? "LOCKSTEP_DEVICE" : "UNUSED", "cpu"}});
      },
      HasSubstr(
          "[device] rank 0 computes on fake, rank 1 on cpu: set LOCKSTEP_DEVICE=cpu for all"));
}

TEST(NcclStart, ALibraryThatIsMissingIsNamedOnAllRanks) {
  const std::string nowhere = "/nowhere/libnccl.so.2";
  expect_refusal(
      [&](int rank) {
        return rank == 1
                   ? Environment{{"LOCKSTEP_DEVICE", "privateuseone"}, {"LOCKSTEP_NCCL", nowhere}}
                   : kFake;
      },
      AllOf(HasSubstr("[nccl] no NCCL library can be opened (" + nowhere + ": cannot open"),
            HasSubstr("(rank 1)")));
}

TEST(NcclStart, ALibraryThatLacksASymbolIsNamed) {
  const std::string other = comm::libtorch_folder() / "libc10.so";
  expect_refusal(
      [&](int) {
        return Environment{{"LOCKSTEP_DEVICE", "privateuseone"}, {"LOCKSTEP_NCCL", other}};
      },
      HasSubstr("[nccl] " + other + " has no ncclGetVersion: it must be NCCL 2.14.0 or newer"));
}

TEST(NcclStart, AnOldLibraryIsRefused) {
  expect_refusal(
      [](int) {
        return fake_with({{"FAKE_NCCL_VERSION", "21210"}});
      },
      HasSubstr("is NCCL 2.12.10, but 2.14.0 is the oldest"));
}

TEST(NcclStart, DifferentVersionsAreNamed) {
  expect_refusal(
      [](int rank) {
        return fake_with({{"FAKE_NCCL_VERSION", rank == 0 ? "22809" : "23007"}});
      },
      HasSubstr("[nccl] rank 0 has NCCL 2.28.9, rank 1 has 2.30.7: all ranks need the same"));
}

TEST(NcclStart, BackendsAndDevicesThatContradictEachOtherAreRefused) {
  expect_refusal(
      [](int) {
        return fake_with({{"LOCKSTEP_BACKEND", "gloo"}});
      },
      HasSubstr("LOCKSTEP_DEVICE=cuda needs the nccl backend"));
  expect_refusal(
      [](int) {
        return Environment{{"LOCKSTEP_BACKEND", "nccl"}, {"LOCKSTEP_DEVICE", "cpu"}};
      },
      HasSubstr("LOCKSTEP_BACKEND=nccl is for GPUs, but LOCKSTEP_DEVICE=cpu"));
  expect_refusal(
      [](int) {
        return Environment{{"LOCKSTEP_DEVICE", "tpu"}};
      },
      HasSubstr("LOCKSTEP_DEVICE='tpu' is none of auto, cpu, cuda"));
}

// Whatever this machine has, a rank on the CPU opens nothing of a GPU's.
TEST(NcclStart, OnTheCpuNothingOfAGpuIsOpened) {
  spawn_bare(2, [](int) {
    setenv("LOCKSTEP_DEVICE", "cpu", 1);
    World world = World::from_env();
    EXPECT_EQ(world.device(), at::kCPU);
    EXPECT_EQ(world.group().backend(), "shm");
    EXPECT_THAT(maps(), AllOf(Not(HasSubstr("nccl")), Not(HasSubstr("libcuda.so")),
                              Not(HasSubstr("torch_cuda"))));
  });
}

}  // namespace
}  // namespace lockstep::test

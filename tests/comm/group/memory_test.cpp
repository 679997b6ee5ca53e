// Memory of a group, which ranks free when they like.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::message_of;
using test::name_of;
using test::Ranks;
using test::spawn;
using testing::HasSubstr;

class GroupMemoryOf : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, GroupMemoryOf,
                         testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3},
                                         Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

class EmptyTensorOf : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, EmptyTensorOf,
                         testing::Values(Ranks{"shm", 1}, Ranks{"shm", 2}, Ranks{"tcp", 2},
                                         Ranks{"gloo", 2}, Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

// Rank 0 reads what the others name in their calls, though it has freed its own part of that.
TEST_P(GroupMemoryOf, OneRankMayFreeWhatTheOthersUse) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    at::Tensor mine = group.empty({1000}), other = group.empty({1000});
    if (group.rank() == 0) std::swap(mine, other), other = at::Tensor();
    for (int i = 0; i < 3; ++i) {
      mine.fill_(group.rank());
      group.all_reduce(mine).wait();
      EXPECT_TRUE(at::equal(mine, at::full({1000}, float(group.size() * (group.size() - 1) / 2))));
    }
  });
}

TEST_P(GroupMemoryOf, HasNoNegativeSize) {
  spawn(GetParam(), [](World& world) {
    EXPECT_THROW(world.group().empty({-1}), ConfigError);
    EXPECT_THROW(world.group().shared({2, -1}), ConfigError);
  });
}

// Of the bytes of all ranks there are more than 64 bits count.
TEST_P(GroupMemoryOf, IsRefusedWhereItCannotBeCounted) {
  spawn(GetParam(), [](World& world) {
    for (const int64_t count : {int64_t{1} << 59, (int64_t{1} << 60) - 1}) {
      EXPECT_THAT(message_of<CommError>([&] { (void)world.group().empty({count}, at::kDouble); }),
                  HasSubstr("bytes of shared memory"));
    }
  });
}

// Leaves this process room for no more than `bytes`, and for the libraries' own.
void limit_memory(int64_t bytes) {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit limit{static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + bytes), RLIM_INFINITY};
  EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

TEST_P(GroupMemoryOf, EndsTheGroupWhereOneRankHasTooLittle) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    group.barrier().wait();
    if (group.rank() + 1 == group.size()) limit_memory(16 << 20);
    EXPECT_THAT(message_of<CommError>([&] {
                  (void)group.empty({16 << 20});
                  group.barrier().wait();
                }),
                HasSubstr("cannot map"));
    EXPECT_NE(message_of<CommError>([&] { group.barrier().wait(); }), "nothing");
  });
}

TEST(GroupMemoryOfAPart, IsAnErrorOfAllWhereOneRankHasTooLittle) {
  spawn(3, [](World& world) {
    const Group& group = world.group();
    group.barrier().wait();
    if (group.rank() == 1) limit_memory(1 << 20);
    EXPECT_THAT(message_of<CommError>([&] { (void)group.split(0); }), HasSubstr("cannot map"));
    group.barrier().wait();  // which goes on
  });
}

#ifndef __SANITIZE_ADDRESS__  // whose allocator ends the process
// A call that one rank could not begin is not numbered: it may make it again.
TEST(MemoryOfACall, IsMissedByOneRankBeforeItsCallCounts) {
  spawn(2,
        [](World& world) {
          at::Tensor sum = at::ones({int64_t{32} << 20});
          world.group().barrier().wait();
          if (world.rank() == 1) {
            limit_memory(16 << 20);
            EXPECT_THROW((void)world.group().reduce(sum, 0), std::bad_alloc);
            const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
            EXPECT_EQ(setrlimit(RLIMIT_AS, &none), 0);
          }
          world.group().reduce(sum, 0).wait();
          EXPECT_EQ(sum[sum.numel() - 1].item<float>(), world.rank() == 0 ? 2 : 1);
        },
        {.backend = "tcp"});
}

// What tests before this one have freed may serve a call, too. It stays taken until this rank ends.
void take_what_the_heap_has() {
  for (size_t bytes = size_t{64} << 20; bytes >= size_t{64} << 10; bytes /= 2) {
    while (void* volatile taken = std::malloc(bytes)) static_cast<void>(taken);
  }
}

// One that counts, and for which memory is missing as it begins to exchange, fails on all ranks.
TEST(MemoryOfACall, IsMissedByOneRankWhoseCallCounts) {
  spawn(2,
        [](World& world) {
          const at::Tensor sum = at::ones({int64_t{8} << 20});
          world.group().barrier().wait();
          if (world.rank() == 1) {
            limit_memory(0);
            take_what_the_heap_has();
          }
          EXPECT_THAT(message_of<CommError>([&] { world.group().all_reduce(sum).wait(); }),
                      HasSubstr("failed (std::bad_alloc)"));
        },
        {.backend = "tcp", .timeout = std::chrono::seconds(20)});
}
#endif

TEST_P(EmptyTensorOf, IsAlikeOnEveryTransport) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const auto options = at::TensorOptions(at::kDouble).requires_grad(true);
    EXPECT_TRUE(group.empty({300, 3}, options).requires_grad());
    EXPECT_TRUE(group.empty({0}, options).requires_grad());
    EXPECT_FALSE(group.empty({3}).requires_grad());
    EXPECT_THAT(message_of<ConfigError>([&] { group.empty({3}, options.dtype(at::kInt)); }),
                HasSubstr("[comm] empty: int32 has no gradients"));
    const int64_t many = (int64_t{1} << 32) + 1;
    EXPECT_THAT(message_of<ConfigError>([&] {
                  group.empty({many, int64_t{1} << 32});
                }),
                HasSubstr("[comm] empty: sizes [4294967297, 4294967296] are more than"));
    EXPECT_NE(message_of<CommError>([&] { group.empty({int64_t{1} << 50}); }), "nothing");
  });
}

int64_t mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:lockstep") != std::string::npos;
  return count;
}

TEST_P(GroupMemoryOf, IsGivenBackWhenAllHaveFreedIt) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int64_t before = mapped_segments();
    for (int i = 0; i < 20; ++i) {
      at::Tensor memory = group.empty({100000});
      memory.fill_(1);
      group.all_reduce(memory).wait();
    }
    group.barrier().wait();
    const at::Tensor last = group.empty({1});
    EXPECT_LE(mapped_segments(), before + 3);
  });
}

}  // namespace
}  // namespace lockstep::comm

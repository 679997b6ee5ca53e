// Groups without a launcher: from a store, and from an address.
#include "lockstep/comm/join.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <csignal>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/file_store.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/pretend_launcher.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using std::chrono::milliseconds;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

void expect_works(const Group& group, int ranks) {
  at::Tensor one = at::ones({3});
  group.all_reduce(one).wait();
  EXPECT_EQ(one[0].item<int>(), ranks);
}

class Joins : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, Joins,
                         testing::Values(Ranks{"auto", 3}, Ranks{"tcp", 2},
                                         Ranks{"auto", 4, {0, 1, 0, 1}}),
                         name_of);

TEST_P(Joins, MakeGroupsOfAnyStore) {
  const Ranks ranks = GetParam();
  const std::string path = new_file();
  spawn_bare(ranks.count,
             [&](int rank) {
               setenv("GLOO_SOCKET_IFNAME", "lo", 1);
               // One for both groups: the last FileStore of a path to be destroyed removes the
               // file, which may be after another rank has begun to use it for the next group.
               const auto file = file_store(path, ranks.count);
               for (const char* name : {"first", "second"}) {
                 const auto store = c10::make_intrusive<::c10d::PrefixStore>(name, file);
                 const Group group = join_group(store, {rank, ranks.count});
                 EXPECT_EQ(group.backend(), ranks.hosts.empty()
                                                ? (ranks.backend == "tcp" ? "tcp" : "shm")
                                                : "host-then-net");
                 expect_works(group, ranks.count);
               }
             },
             {.backend = ranks.backend, .hosts = ranks.hosts});
  unlink(path.c_str());
}

// As destroy_process_group() and init_process_group() in one process do, under the same keys.
TEST_P(Joins, MakeOneGroupAfterAnotherByTheSameKeys) {
  const Ranks ranks = GetParam();
  const std::string path = new_file();
  spawn_bare(ranks.count,
             [&](int rank) {
               setenv("GLOO_SOCKET_IFNAME", "lo", 1);
               const auto store = file_store(path, ranks.count);
               for (int i = 0; i < 5; ++i) {
                 // Rank 0 is late: the others have looked for its address before.
                 const std::string key = fmt::format("come {}", i);
                 while (rank == 0 && store->add(key, 0) < ranks.count - 1) usleep(1000);
                 if (rank != 0) store->add(key, 1);
                 const Group group = join_group(store, {rank, ranks.count});
                 expect_works(group, ranks.count);
                 // Until the slowest one has returned.
                 group.barrier().wait();
                 EXPECT_FALSE(store->check({fmt::format("lockstep/host/{}", rank)}));
                 if (rank == 0) {
                   EXPECT_FALSE(store->check({"lockstep/store"}));
                 }
               }
             },
             {.backend = ranks.backend, .hosts = ranks.hosts});
  unlink(path.c_str());
}

// Ranks 0 and 1 of the job end well; the others' group numbers itself from 0.
TEST(JoinOfSomeRanks, BlamesTheRankThatEndedAndNoOther) {
  for (const char* backend : {"shm", "tcp"}) {
    for (const bool is_told : {true, false}) {
      PretendLauncher launcher(4);
      const std::string path = new_file();
      spawn_bare(4,
                 [&](int rank) {
                   if (rank < 2) return launcher.control.record_exit(rank, 0);
                   setenv("GLOO_SOCKET_IFNAME", "lo", 1);
                   Membership me{rank - 2, 2};
                   if (is_told) me.world_ranks = {2, 3};
                   const Group group = join_group(file_store(path, 2), me);
                   group.barrier().wait();
                   if (rank == 3) {
                     while (!launcher.control.fate(0) || !launcher.control.fate(1)) usleep(1000);
                     launcher.control.record_exit(3, SIGKILL);
                     raise(SIGKILL);
                   }
                   const std::string error =
                       message_of<CommError>([&] { group.all_reduce(at::ones({4})).wait(); });
                   EXPECT_THAT(error, Not(HasSubstr("exited with status 0")));
                   const auto named =
                       ContainsRegex("rank 3( of the world.)? was killed by SIGKILL");
                   if (is_told) {
                     EXPECT_THAT(error, named);
                   }
                 },
                 {.backend = backend, .doomed = {3}});
      unlink(path.c_str());
    }
  }
}

TEST(JoinAtAnAddress, MakesGroupsOneAfterTheOther) {
  LoopbackSocket free;
  free.listen();
  const std::string address = "127.0.0.1:" + std::to_string(free.port);
  free.fd.reset();
  spawn_bare(2, [&](int rank) {
    for (int i = 0; i < 3; ++i) {
      const Group group = join_group(address, {rank, 2});
      at::Tensor one = at::full({1}, rank + i);
      group.all_reduce(one).wait();
      EXPECT_EQ(one.item<int>(), 1 + 2 * i);
    }
  });
}

TEST(JoinAtAnAddress, RefusesASecondSecretAtOnePort) {
  LoopbackSocket free;
  free.listen();
  const std::string address = "127.0.0.1:" + std::to_string(free.port);
  free.fd.reset();
  spawn_bare(2, [&](int rank) {
    const auto join = [&](const char* secret, milliseconds timeout) {
      return join_group(address, {rank, 2}, {.timeout = timeout, .secret = secret});
    };
    join("the first group's", milliseconds(60'000)).barrier().wait();
    const auto again = [&] { join("the second group's", milliseconds(2000)); };
    if (rank == 0) {
      EXPECT_THAT(again, ThrowsMessage<ConfigError>(HasSubstr("another port")));
    } else {
      EXPECT_THAT(again, ThrowsMessage<CommError>(HasSubstr("secret")));
    }
    join("the first group's", milliseconds(60'000)).barrier().wait();
  });
}

TEST(JoinRefuses, WhatCannotBe) {
  spawn_bare(1, [](int) {
    const auto no_store = c10::intrusive_ptr<::c10d::Store>();
    EXPECT_THAT(
        [&] {
          join_group(no_store, {2, 2});
        },
        ThrowsMessage<ConfigError>(HasSubstr("rank 2 of 2")));
    EXPECT_EQ(join_group(no_store, {0, 1}).size(), 1);
    setenv("LOCKSTEP_BACKEND", "nccl", 1);
    EXPECT_THAT(
        [&] {
          join_group(no_store, {0, 2});
        },
        ThrowsMessage<ConfigError>(HasSubstr("nccl")));
  });
}

// What was set is named, not the device that follows from it.
TEST(WorldRefuses, ABackendForGpusWhereThereAreNone) {
  spawn_bare(1, [](int) {
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    for (const char* backend : {"nccl", "cuda_ipc"}) {
      setenv("LOCKSTEP_BACKEND", backend, 1);
      EXPECT_THAT([] { World::from_env(); },
                  ThrowsMessage<ConfigError>(
                      HasSubstr(fmt::format("[device] the backend {} is asked for", backend))));
    }
    setenv("LOCKSTEP_BACKEND", "auto", 1);
    setenv("LOCKSTEP_DEVICE", "cuda", 1);
    EXPECT_THAT([] { World::from_env(); },
                ThrowsMessage<ConfigError>(HasSubstr("[device] cuda is asked for")));
  });
}

TEST(JoinWaits, ForADeadlineAndNamesWhoIsMissing) {
  const std::string path = new_file();
  spawn_bare(2, [&](int rank) {
    EXPECT_THAT(
        [&] {
          join_group(file_store(path, 3), {rank, 3}, {.timeout = milliseconds(3000)});
        },
        ThrowsMessage<CommError>(
            HasSubstr(rank == 0 ? "1 of 3 ranks have not come within" : "rank 0")));
  });
  unlink(path.c_str());
}

}  // namespace
}  // namespace lockstep::test

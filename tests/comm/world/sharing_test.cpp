// Ranks of one host that do not see each other: other users, user namespaces, filters of system
// calls.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "lockstep/core/error.h"
#include "support/refuse.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using test::spawn_bare;
using testing::AllOf;
using testing::HasSubstr;

// Another user for each rank, where this test may; else processes that nobody may look into.
void become_somebody_else(int rank) {
  if (geteuid() == 0) {
    const auto user = static_cast<uid_t>(60000 + rank);
    ASSERT_EQ(setresgid(user, user, user), 0);
    ASSERT_EQ(setresuid(user, user, user), 0);
  }
  ASSERT_EQ(prctl(PR_SET_DUMPABLE, 0), 0);
}

void use_all_memory(const Group& group) {
  const int size = group.size();
  for (at::Tensor data : {at::ones({100000}), group.empty({100000}).fill_(1)}) {
    group.all_reduce(data).wait();
    EXPECT_EQ(data.sum().item<float>(), 100000.f * static_cast<float>(size));
  }
  const Group part = group.split(group.rank() % 2);
  at::Tensor one = at::ones({1});
  part.all_reduce(one).wait();
  EXPECT_EQ(one.item<float>(), static_cast<float>(part.size()));
  group.barrier().wait();
}

// Tests that run beside this one have theirs for a moment.
bool nothing_is_left_in_shared_memory() {
  const auto is_ours = [](const auto& file) {
    return file.path().filename().string().starts_with("lockstep-segment-");
  };
  const auto end = std::chrono::steady_clock::now() + 20s;
  do {
    const std::filesystem::directory_iterator files("/dev/shm");
    if (std::none_of(begin(files), std::filesystem::directory_iterator(), is_ours)) return true;
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

TEST(SharingMemory, BetweenUsers) {
  spawn_bare(4, [](int rank) {
    become_somebody_else(rank);
    const World world = World::from_env({.timeout = 60s});
    EXPECT_EQ(world.group().backend(), "shm");
    use_all_memory(world.group());
  });
}

TEST(SharingMemory, BetweenUserNamespaces) {
  spawn_bare(3, [](int rank) {
    if (unshare(CLONE_NEWUSER) != 0) become_somebody_else(rank);
    const World world = World::from_env({.timeout = 60s});
    EXPECT_EQ(world.group().backend(), "shm");
    use_all_memory(world.group());
  });
}

// Machines that were cloned while they ran say the same of their kernel.
TEST(SharingMemory, NotWithAHostOfAnotherName) {
  spawn_bare(2, [](int rank) {
    const bool own_name = unshare(CLONE_NEWUTS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWUTS) == 0;
    const std::string name = "clone" + std::to_string(rank);
    // Where a test may not change it, the user's word does the same.
    if (!own_name || sethostname(name.c_str(), name.size()) != 0)
      setenv("LOCKSTEP_HOST", name.c_str(), 1);
    const World world = World::from_env({.timeout = 60s});
    EXPECT_EQ(world.group().backend(), "tcp");
    use_all_memory(world.group());
  });
}

void refuse_sockets_of_the_host() { test::refuse_system_call(SYS_socket, EPERM, 0, AF_UNIX); }
void refuse_names() { test::refuse_system_call(SYS_openat, EACCES, 2, O_NOFOLLOW); }

TEST(SharingMemory, ByANameWhereOneRankHasNoSocket) {
  for (const int odd : {0, 1}) {
    spawn_bare(3, [odd](int rank) {
      if (rank == odd) refuse_sockets_of_the_host();
      const World world = World::from_env({.timeout = 60s});
      EXPECT_EQ(world.group().backend(), "shm");
      use_all_memory(world.group());
    });
  }
  EXPECT_TRUE(nothing_is_left_in_shared_memory());
}

TEST(SharingMemory, WhereItCannotBeAllRanksTakeTheNetwork) {
  for (const int odd : {0, 1}) {
    const auto limited = [odd](int rank) {
      if (rank != odd) return;
      refuse_sockets_of_the_host();
      refuse_names();
    };
    spawn_bare(3, [&](int rank) {
      limited(rank);
      const World world = World::from_env({.timeout = 60s});
      EXPECT_EQ(world.group().backend(), "tcp");
      use_all_memory(world.group());
    });
    spawn_bare(3,
               [&](int rank) {
                 limited(rank);
                 EXPECT_THAT(
                     test::message_of<CommError>([] { (void)World::from_env({.timeout = 60s}); }),
                     AllOf(HasSubstr("the shm backend was asked for"),
                           HasSubstr("ranks 0, 1, 2 of one host cannot share memory")));
               },
               {.backend = "shm"});
  }
  EXPECT_TRUE(nothing_is_left_in_shared_memory());
}

}  // namespace
}  // namespace lockstep::comm

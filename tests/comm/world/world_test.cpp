// How ranks find each other, and what they say when they cannot.
#include "lockstep/comm/world.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <malloc.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <optional>
#include <vector>

#include "comm/store/store.h"
#include "comm/world/rendezvous.h"
#include "core/files/fd.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/spawn.h"
#include "support/thrown.h"
#include "support/without_stdout.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using test::isolated;
using test::spawn;
using test::spawn_bare;
using testing::AllOf;
using testing::AnyOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

using Environment = std::map<std::string, std::string>;  // an empty text unsets

void apply(const Environment& environment) {
  for (const auto& [name, text] : environment) {
    text.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), text.c_str(), 1);
  }
}

const Environment kNothing = {
    {"RANK", ""},        {"WORLD_SIZE", ""},  {"LOCAL_RANK", ""},        {"LOCAL_WORLD_SIZE", ""},
    {"MASTER_ADDR", ""}, {"MASTER_PORT", ""}, {"LOCKSTEP_STORE_FD", ""}, {"LOCKSTEP_BACKEND", ""}};

// What from_env() throws in a process of its own with these variables alone.
void expect_refused(const Environment& environment, const testing::Matcher<std::string>& says) {
  spawn_bare(1, [&](int) {
    apply(kNothing);
    apply(environment);
    try {
      (void)World::from_env({.timeout = 300ms});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.what()), says);
    }
  });
}

TEST(World, IsOneRankWhenNothingLaunchedIt) {
  spawn_bare(1, [](int) {
    apply(kNothing);
    const World world = World::from_env();
    EXPECT_EQ(world.rank(), 0);
    EXPECT_EQ(world.size(), 1);
    EXPECT_EQ(world.local_size(), 1);
    EXPECT_EQ(world.group().backend(), "solo");
    EXPECT_THAT(world.describe(), StartsWith("1 rank on 1 host, solo, 1 thread each"));
  });
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // whose malloc is their own
// Whether malloc maps a piece of its own for it.
bool maps(size_t bytes) {
  const size_t before = mallinfo2().hblks;
  void* volatile piece = std::malloc(bytes);
  const bool mapped = mallinfo2().hblks > before;
  std::free(piece);
  return mapped;
}

TEST(World, NoSocketIsStdoutOfAProgramWithoutOne) {
  const auto expect_open = [] { EXPECT_GE(fcntl(STDOUT_FILENO, F_GETFD), 0); };
  isolated([&] {
    const test::WithoutStdout closed;
    static_cast<void>(World::solo());
    expect_open();
  });
  spawn_bare(2, [&](int) {
    const test::WithoutStdout closed;
    const World world = World::from_env();
    expect_open();
  });
}

TEST(World, LargePiecesComeFromTheHeapThatAStepLeaves) {
  for (const bool users_own : {false, true}) {
    spawn_bare(1, [&](int) {
      apply(kNothing);
      if (users_own) mallopt(M_MMAP_THRESHOLD, 1 << 20);
      const World world = World::from_env();
      EXPECT_EQ(maps(24 << 20), users_own);
    });
  }
}
#endif

TEST(World, SaysToWhichCoresItIsBound) {
  spawn_bare(1, [](int) {
    cpu_set_t mask;
    ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
    int core = 0;
    while (!CPU_ISSET(core, &mask)) ++core;
    CPU_ZERO(&mask);
    CPU_SET(core, &mask);
    ASSERT_EQ(sched_setaffinity(0, sizeof mask, &mask), 0);
    const std::string told = ", rank 0 on core " + std::to_string(core);
    // With one core there is nothing to tell.
    EXPECT_THAT(World::solo().describe(),
                EndsWith(sysconf(_SC_NPROCESSORS_ONLN) == 1 ? "each" : told));
  });
}

TEST(World, KnowsItsPlace) {
  spawn(3, [](World& world) {
    EXPECT_EQ(world.size(), 3);
    EXPECT_EQ(world.local_size(), 3);
    EXPECT_EQ(world.local_rank(), world.rank());
    EXPECT_EQ(world.group().backend(), "shm");
    EXPECT_THAT(world.describe(), StartsWith("3 ranks on 1 host, shm, 1 thread each"));
  });
}

// A rank may start ranks of its own, which inherit its variables and its socket's number.
TEST(World, OfAJobWithinARankMeetsAtItsOwnPort) {
  for (const char* inherited : {"a socket at another port", "nothing"}) {
    test::LoopbackSocket own;
    own.fd.reset();
    spawn_bare(2, [&](int rank) {
      setenv("MASTER_PORT", std::to_string(own.port).c_str(), 1);
      if (rank == 0 && inherited == std::string("nothing")) setenv("LOCKSTEP_STORE_FD", "3000", 1);
      const World world = World::from_env({.timeout = 20s});
      at::Tensor data = at::ones({1});
      world.group().all_reduce(data).wait();
      EXPECT_EQ(data.item<float>(), 2) << inherited;
    });
  }
}

TEST(World, ASecondOneMeetsTheSecondOnesOfTheOthers) {
  spawn(2, [](World& first) {
    const World second = World::from_env();
    at::Tensor data = at::ones({1});
    second.group().all_reduce(data).wait();
    first.group().all_reduce(data).wait();
    EXPECT_EQ(data.item<float>(), 4);
  });
}

// Rank 0, which serves the store, leaves its first world when rank 1 has asked for the second.
TEST(World, TheNextOneIsMetByARankThatIsAhead) {
  for (const char* backend : {"shm", "tcp", "gloo"}) {
    spawn_bare(2,
               [](int rank) {
                 {
                   const World first = World::from_env();
                   first.group().barrier().wait();
                   if (rank == 0) {
                     const int port = std::atoi(std::getenv("MASTER_PORT"));
                     Store::connect({.host = "127.0.0.1", .port = port})
                         .wait({"lockstep/job/0/1/members/come"}, 60s);
                   }
                 }
                 const World second = World::from_env();
                 at::Tensor data = at::ones({1});
                 second.group().all_reduce(data).wait();
                 EXPECT_EQ(data.item<float>(), 2);
               },
               {.backend = backend});
  }
}

TEST(World, TheLongestTimeoutIsNone) {
  const auto longest = std::chrono::milliseconds::max();
  for (const char* backend : {"shm", "tcp", "gloo"}) {
    spawn_bare(2,
               [&](int rank) {
                 const World world = World::from_env({.timeout = longest});
                 const Group part = world.group().split(0);
                 if (rank == 0) world.store().get("go", longest);
                 Work work = part.barrier({.timeout = longest});
                 if (rank == 1) {
                   EXPECT_FALSE(work.wait_for(20ms));
                   world.store().set("go", "");
                 }
                 EXPECT_TRUE(work.wait_for(std::chrono::microseconds::max()));
                 EXPECT_EQ(World::solo().store().add("one", 1), 1);
                 World::solo().store().wait({}, longest);
                 world.group().barrier().wait();
               },
               {.backend = backend});
  }
  for (const auto timeout : {0ms, -5ms, std::chrono::milliseconds::min()}) {
    isolated([&] {
      try {
        (void)World::from_env({.timeout = timeout});
        ADD_FAILURE() << "nothing was thrown";
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), HasSubstr("[comm] world: a timeout of"));
      }
    });
  }
}

TEST(World, RefusesVariablesThatContradictEachOther) {
  const Environment base = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29999"}};
  const auto with = [&](Environment changes) {
    changes.insert(base.begin(), base.end());
    return changes;
  };
  expect_refused({{"RANK", "0"}}, AllOf(HasSubstr("RANK is set, but WORLD_SIZE is not")));
  expect_refused({{"WORLD_SIZE", "2"}}, HasSubstr("WORLD_SIZE is set, but RANK is not"));
  expect_refused(with({{"RANK", "2"}}), HasSubstr("RANK=2 with WORLD_SIZE=2"));
  expect_refused(with({{"RANK", "-1"}}), HasSubstr("RANK='-1'"));
  expect_refused(with({{"RANK", "one"}}), HasSubstr("RANK='one' is not a whole number"));
  expect_refused(with({{"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE='0'"));
  expect_refused(with({{"LOCAL_WORLD_SIZE", "3"}}),
                 HasSubstr("LOCAL_WORLD_SIZE=3 with WORLD_SIZE=2"));
  expect_refused(with({{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
                 HasSubstr("LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"));
  expect_refused(with({{"MASTER_ADDR", ""}}), HasSubstr("needs MASTER_ADDR"));
  expect_refused(with({{"MASTER_PORT", ""}}), HasSubstr("needs MASTER_PORT"));
  expect_refused(with({{"MASTER_PORT", "70000"}}), HasSubstr("MASTER_PORT='70000'"));
  expect_refused(with({{"LOCKSTEP_BACKEND", "smoke"}}),
                 HasSubstr("LOCKSTEP_BACKEND='smoke' is none of auto, shm, tcp, gloo"));
  expect_refused(with({{"LOCKSTEP_BACKEND", "mpi"}}),
                 HasSubstr("ranks that mpirun starts find each other without it"));
  expect_refused(with({{"LOCKSTEP_BACKEND", "shm"}, {"LOCKSTEP_PYTHON_PEERS", "1"}}),
                 HasSubstr("gloo only"));
  expect_refused(with({{"LOCKSTEP_TIMEOUT", "0"}}), HasSubstr("LOCKSTEP_TIMEOUT='0'"));
  expect_refused({{"LOCKSTEP_TLS", "2"}}, HasSubstr("LOCKSTEP_TLS='2'"));
}

TEST(World, NamesTheRanksThatDoNotCome) {
  spawn_bare(2, [](int rank) {
    setenv("WORLD_SIZE", "4", 1);
    unsetenv("LOCAL_WORLD_SIZE");
    try {
      (void)World::from_env({.timeout = 3s});  // in which two come, on a busy machine, too
      ADD_FAILURE() << "nothing was thrown";
    } catch (const CommError& error) {
      // Rank 0 serves the store: when it gives up first, the other may see just that.
      EXPECT_THAT(std::string(error.what()),
                  AnyOf(AllOf(HasSubstr("met 2 of 4 ranks"), HasSubstr("missing: 2, 3")),
                        HasSubstr(rank == 1 ? "[store]" : "-")));
    }
  });
}

TEST(World, RanksWithDifferentWorldSizesAllSayWhich) {
  for (const int odd : {0, 1}) {
    spawn_bare(2, [&](int rank) {
      if (rank == odd) setenv("WORLD_SIZE", "3", 1);
      try {
        (void)World::from_env({.timeout = 20s});
        ADD_FAILURE() << "nothing was thrown";
      } catch (const ConfigError& error) {
        EXPECT_THAT(std::string(error.what()),
                    AllOf(HasSubstr("WORLD_SIZE=2"), HasSubstr("WORLD_SIZE=3")));
      }
    });
  }
}

void on_pipe(int) {}

TEST(World, ABrokenConnectionIsNotTheEndOfARank) {
  for (const auto before : {SIG_DFL, &on_pipe}) {
    spawn_bare(2, [&](int) {
      signal(SIGPIPE, before);
      const World world = World::from_env();
      EXPECT_EQ(signal(SIGPIPE, SIG_DFL), before == SIG_DFL ? SIG_IGN : before);
      world.group().barrier().wait();
    });
  }
}

TEST(World, RanksThatAskForDifferentTransportsAreTold) {
  const std::pair<Environment, Environment> worlds[] = {
      {{{"LOCKSTEP_BACKEND", "tcp"}}, {{"LOCKSTEP_BACKEND", "gloo"}}},
      {{{"LOCKSTEP_BACKEND", "auto"}}, {{"LOCKSTEP_BACKEND", "tcp"}}},
      {{{"LOCKSTEP_NET", "gloo"}}, {}}};
  for (const auto& [odd, others] : worlds) {
    spawn_bare(2, [&](int rank) {
      setenv("LOCKSTEP_HOST", rank == 0 ? "one" : "two", 1);
      apply(rank == 0 ? odd : others);
      try {
        (void)World::from_env({.timeout = 5s});
        ADD_FAILURE() << "nothing was thrown";
      } catch (const ConfigError& error) {
        EXPECT_THAT(std::string(error.what()),
                    AllOf(HasSubstr("rank 0 asks for"), HasSubstr("rank 1 asks for"),
                          HasSubstr(odd.begin()->first)));
      }
    });
  }
}

TEST(World, RaisesTheLimitOfDescriptors) {
  spawn_bare(2, [](int) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = std::min<rlim_t>(64, limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
    const World world = World::from_env();
    getrlimit(RLIMIT_NOFILE, &limit);
    EXPECT_EQ(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, 524288));
    world.group().barrier().wait();
  });
}

TEST(World, NamesTheLimitOfDescriptorsWhereItIsTooLow) {
  for (const std::string backend : {"gloo", "tcp"}) {
    spawn_bare(3,
               [](int) {
                 const rlimit limit{24, 24};
                 setrlimit(RLIMIT_NOFILE, &limit);
                 std::vector<Fd> used;
                 for (int i = 0; i < 8; ++i) used.emplace_back(dup(1));
                 try {
                   (void)World::from_env({.timeout = 20s});
                   ADD_FAILURE() << "nothing was thrown";
                 } catch (const CommError& error) {
                   EXPECT_THAT(std::string(error.what()),
                               AnyOf(AllOf(HasSubstr("of at most 24"), HasSubstr("ulimit -n")),
                                     HasSubstr("[store]")));
                 }
               },
               {.backend = backend});
  }
}

// Each copy of the library counts its worlds, so that both ask for the first one.
TEST(World, TwoCopiesOfTheLibraryInOneProcessAreTold) {
  isolated([] {
    test::LoopbackSocket socket;
    const Store store = Store::connect({.host = "127.0.0.1",
                                        .port = socket.port,
                                        .server = true,
                                        .listen_fd = socket.listen().fd.release()});
    const auto join = [&] { exchange_members(store, 0, this_member(1, 0, {}), 60s); };
    join();
    EXPECT_THAT(test::message_of<ConfigError>(join),
                AllOf(HasSubstr("rank 0 has joined already, in this process"),
                      HasSubstr("two copies of Lockstep")));
  });
}

TEST(World, TwoProcessesWithOneRankAreTold) {
  // Rank 0 stays until both others know.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  int refused = 0;
  const auto statuses = spawn_bare(
      3,
      [&](int process) {
        setenv("WORLD_SIZE", "2", 1);
        setenv("LOCAL_WORLD_SIZE", "2", 1);
        if (process == 2) {
          setenv("RANK", "1", 1);
          setenv("LOCAL_RANK", "1", 1);
        }
        int status = 0;
        std::optional<World> world;  // whose rank 0 serves the store
        try {
          world = World::from_env();
        } catch (const ConfigError& error) {
          status = std::string(error.what()).find("two processes have RANK=1") != std::string::npos
                       ? 7
                       : 1;
        } catch (const Error&) {
          status = 1;
        }
        char byte = 0;
        if (process != 0) {
          (void)!write(ends[1], &byte, 1);
        } else {
          for (int other = 0; other < 2; ++other) (void)!read(ends[0], &byte, 1);
        }
        _exit(status);
      },
      {.doomed = {1, 2}});
  close(ends[0]);
  close(ends[1]);
  for (int status : statuses) refused += WIFEXITED(status) && WEXITSTATUS(status) == 7;
  EXPECT_EQ(refused, 1);
}

TEST(World, NobodyAtTheAddressIsSaidWithTheAddress) {
  expect_refused(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}},
      AllOf(HasSubstr("127.0.0.1:1"), HasSubstr("MASTER_ADDR")));
}

}  // namespace
}  // namespace lockstep::comm

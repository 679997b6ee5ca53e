// Encryption by option rather than by variable, in groups of every shape, and what is refused.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "comm/file_store.h"
#include "lockstep/comm/join.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using namespace std::chrono_literals;

const std::string kOwnKey(64, 'a'), kOtherKey(64, 'b');

void know(const std::string& key) { setenv("LOCKSTEP_JOB_KEY", key.c_str(), 1); }

double sum_of_ones(const Group& group) {
  at::Tensor one = at::ones({5'000});
  group.all_reduce(one).wait();
  return one.mean().item<double>();
}

class TlsByOption : public testing::TestWithParam<Ranks> {};

INSTANTIATE_TEST_SUITE_P(Transports, TlsByOption,
                         testing::Values(Ranks{"tcp", 2}, Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"auto", 5, {0, 1, 0, 1, 1}}),
                         name_of);

TEST_P(TlsByOption, EncryptsTheWorldAndItsParts) {
  spawn_bare(GetParam().count,
             [](int rank) {
               know(kOwnKey);
               const World world = World::from_env({.tls = true});
               EXPECT_THAT(world.describe(), HasSubstr(" with TLS, "));
               EXPECT_EQ(sum_of_ones(world), world.size());
               const Group part = world.group().split(rank % 2);
               EXPECT_EQ(sum_of_ones(part), part.size());
               // The variable overrides the option.
               setenv("LOCKSTEP_TLS", "0", 1);
               const World plain = World::from_env({.tls = true});
               EXPECT_THAT(plain.describe(), Not(HasSubstr("TLS")));
               EXPECT_EQ(sum_of_ones(plain), plain.size());
             },
             {.backend = GetParam().backend, .hosts = GetParam().hosts});
}

TEST(TlsOption, HasNothingToEncryptWithinAHostOrARank) {
  spawn_bare(2, [](int) {
    know(kOwnKey);
    const World world = World::from_env({.tls = true});
    EXPECT_THAT(world.describe(), HasSubstr("shm, "));
    EXPECT_EQ(sum_of_ones(world), 2);
  });
  spawn_bare(1, [](int) {
    setenv("LOCKSTEP_TLS", "1", 1);
    EXPECT_EQ(World::from_env().size(), 1);
  });
}

TEST(TlsOption, IsRefusedByNameWhereItCannotBe) {
  const auto refusal = [](const comm::WorldOptions& options) {
    return message_of<ConfigError>([&] { (void)World::from_env(options); });
  };
  spawn_bare(2, [&](int) {
    EXPECT_THAT(refusal({.tls = true}), HasSubstr("share no secret"));
    know(kOwnKey);
    EXPECT_THAT(refusal({.backend = comm::Backend::Gloo, .tls = true}),
                HasSubstr("gloo sends everything as it is"));
    EXPECT_THAT(refusal({.tls = true, .python_peers = true}),
                HasSubstr("gloo sends everything as it is"));
  });
}

TEST(TlsOption, OnOneRankOnlyIsRefusedOnAll) {
  spawn_bare(2,
             [](int rank) {
               know(kOwnKey);
               const std::string error = message_of<ConfigError>(
                   [&] { (void)World::from_env({.timeout = 30s, .tls = rank == 1}); });
               EXPECT_THAT(error, AllOf(HasSubstr("LOCKSTEP_TLS=1"), HasSubstr("LOCKSTEP_TLS=0")));
             },
             {.hosts = {0, 1}});
}

TEST(TlsJoin, EncryptsAGroupOfAnyStore) {
  const std::string path = new_file();
  spawn_bare(4,
             [&](int rank) {
               setenv("GLOO_SOCKET_IFNAME", "lo", 1);
               setenv("LOCKSTEP_TOKEN", "a secret of sixteen bytes or more", 1);
               const Group group = join_group(file_store(path, 4), {rank, 4}, {.tls = true});
               EXPECT_EQ(group.backend(), "host-then-net");
               EXPECT_EQ(sum_of_ones(group), 4);
             },
             {.hosts = {0, 1, 0, 1}});
  unlink(path.c_str());
}

// Any store may be open to others: here they find out when they meet.
TEST(TlsJoin, RefusesSecretsThatDifferOnAllRanks) {
  const std::string path = new_file();
  spawn_bare(2,
             [&](int rank) {
               setenv("GLOO_SOCKET_IFNAME", "lo", 1);
               const std::string error = message_of<ConfigError>([&] {
                 join_group(file_store(path, 2), {rank, 2},
                            {.timeout = 30s, .tls = true, .secret = std::string(16, "ab"[rank])});
               });
               EXPECT_THAT(error, HasSubstr("encrypt by different secrets"));
             },
             {.backend = "tcp"});
  unlink(path.c_str());
}

TEST(TlsJoin, RefusesWhatItCannotDo) {
  spawn_bare(2, [](int rank) {
    const auto refusal = [&](const GroupOptions& options) {
      return message_of<ConfigError>([&] { join_group("127.0.0.1:1", {rank, 2}, options); });
    };
    EXPECT_THAT(refusal({.tls = true}), HasSubstr("share no secret"));
    EXPECT_THAT(refusal({.tls = true, .secret = "short"}), HasSubstr("16"));
    EXPECT_THAT(
        refusal({.backend = comm::Backend::Gloo, .tls = true, .secret = std::string(16, 'a')}),
        HasSubstr("gloo sends everything as it is"));
  });
}

TEST(TlsJoin, ServesAnAddressOnlyToThoseWhoKnowItsSecret) {
  LoopbackSocket free;
  free.listen();
  const std::string address = "127.0.0.1:" + std::to_string(free.port);
  free.fd.reset();
  int served[2], tried[2];
  ASSERT_EQ(pipe(served), 0);
  ASSERT_EQ(pipe(tried), 0);
  char byte = 0;
  spawn_bare(
      3,
      [&](int rank) {
        if (rank < 2) {
          // Ranks of two jobs, each with a secret that the other does not have.
          know(rank == 0 ? kOwnKey : kOtherKey);
          const Group group =
              join_group(address, {rank, 2}, {.tls = true, .secret = "what both jobs were given"});
          EXPECT_EQ(sum_of_ones(group), 2);
          if (rank == 1) return;
          EXPECT_EQ(write(served[1], &byte, 1), 1);
          EXPECT_EQ(read(tried[0], &byte, 1), 1);
          return;
        }
        EXPECT_EQ(read(served[0], &byte, 1), 1);
        std::string error = "nothing";
        // Until there was time for an answer.
        for (auto limit = 200ms; limit < 60s && error.find("secret") == error.npos; limit *= 2) {
          error = message_of([&] { join_group(address, {1, 2}, {.timeout = limit}); });
        }
        EXPECT_THAT(error, HasSubstr("it serves only ranks that have the job's secret"));
        EXPECT_EQ(write(tried[1], &byte, 1), 1);
      },
      {.backend = "tcp"});
  for (const int fd : {served[0], served[1], tried[0], tried[1]}) close(fd);
}

}  // namespace
}  // namespace lockstep::test

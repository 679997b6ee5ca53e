// Ranks that encrypt what they send each other, and ranks that cannot.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

const std::string kKey(64, 'a');

void encrypt(const std::string& key = kKey) {
  setenv("LOCKSTEP_TLS", "1", 1);
  if (!key.empty()) setenv("LOCKSTEP_JOB_KEY", key.c_str(), 1);
}

at::Tensor sum_of_rough_numbers(const World& world) {
  torch::manual_seed(7 + world.rank());
  at::Tensor t = at::randn({70'001}).mul_(at::randn({70'001}).exp_());
  world.group().all_reduce(t).wait();
  return t;
}

class TlsOver : public testing::TestWithParam<Ranks> {};

INSTANTIATE_TEST_SUITE_P(Transports, TlsOver,
                         testing::Values(Ranks{"tcp", 3}, Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"shm", 2}),
                         name_of);

TEST_P(TlsOver, HasTheBitsOfThePlainConnection) {
  spawn_bare(GetParam().count,
             [](int) {
               setenv("LOCKSTEP_JOB_KEY", kKey.c_str(), 1);
               const World first = World::from_env();
               const at::Tensor plain = sum_of_rough_numbers(first);
               encrypt();
               const World world = World::from_env();
               EXPECT_TRUE(at::equal(sum_of_rough_numbers(world), plain));
               at::Tensor all = at::empty({world.size(), 40'000});
               world.group().all_gather(all, at::ones({40'000}) * world.rank()).wait();
               EXPECT_EQ(all.sum().item<double>(), 40'000. * world.size() * (world.size() - 1) / 2);
             },
             {.backend = GetParam().backend, .hosts = GetParam().hosts});
}

TEST(Tls, AKilledRankIsNamedAsInTheClear) {
  spawn_bare(3,
             [](int rank) {
               encrypt();
               const World world = World::from_env({.timeout = 60s});
               world.group().barrier().wait();
               if (rank == 2) raise(SIGKILL);
               at::Tensor t = at::ones({1'000'000});
               const auto start = std::chrono::steady_clock::now();
               EXPECT_THAT(message_of<CommError>([&] { world.group().all_reduce(t).wait(); }),
                           AllOf(HasSubstr("[tcp] all_reduce #2"), HasSubstr("rank 2")));
               EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);  // of 60 s
             },
             {.backend = "tcp", .doomed = {2}});
}

TEST(Tls, IsRefusedByNameWhereNothingWouldBeEncrypted) {
  const auto refusal = [](const std::string& key = kKey) {
    encrypt(key);
    return message_of<ConfigError>([] { (void)World::from_env(); });
  };
  spawn_bare(2, [&](int) { EXPECT_THAT(refusal(), HasSubstr("gloo sends everything as it is")); },
             {.backend = "gloo"});
  spawn_bare(2, [&](int) {
    setenv("LOCKSTEP_NET", "gloo", 1);
    EXPECT_THAT(refusal(), HasSubstr("LOCKSTEP_NET=gloo sends"));
    unsetenv("LOCKSTEP_NET");
    setenv("LOCKSTEP_PYTHON_PEERS", "1", 1);
    EXPECT_THAT(refusal(), HasSubstr("LOCKSTEP_TLS=1"));
    unsetenv("LOCKSTEP_PYTHON_PEERS");
    unsetenv("LOCKSTEP_JOB_KEY");
    EXPECT_THAT(refusal(""), HasSubstr("share no secret"));
  });
}

TEST(Tls, RanksThatDoNotAgreeAreTold) {
  spawn_bare(2,
             [](int rank) {
               setenv("LOCKSTEP_JOB_KEY", kKey.c_str(), 1);
               setenv("LOCKSTEP_TLS", rank == 0 ? "1" : "0", 1);
               const std::string error =
                   message_of<ConfigError>([] { (void)World::from_env({.timeout = 20s}); });
               EXPECT_THAT(error,
                           AllOf(HasSubstr("LOCKSTEP_TLS=1"), HasSubstr("LOCKSTEP_TLS=0"),
                                 HasSubstr("rank 0 asks for"), HasSubstr("rank 1 asks for")));
             },
             {.backend = "tcp"});
}

}  // namespace
}  // namespace lockstep::test

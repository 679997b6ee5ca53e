// A job's secret among the processes of one host, and what another user's get.
#include "core/security/local_secret.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "core/hash/mix.h"
#include "core/network/unix_address.h"
#include "core/place/secret.h"
#include "core/place/sources.h"
#include "lockstep/core/error.h"
#include "support/fork.h"
#include "support/thrown.h"

namespace {
std::atomic<bool> peers_are_others = false;
}  // namespace

// In the place of the system's: only root can be another user.
extern "C" int getsockopt(int socket, int level, int name, void* value, socklen_t* size) noexcept {
  const auto got = static_cast<int>(syscall(SYS_getsockopt, socket, level, name, value, size));
  if (peers_are_others && level == SOL_SOCKET && name == SO_PEERCRED) {
    ++static_cast<ucred*>(value)->uid;
  }
  return got;
}

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using test::message_of;
using ::testing::HasSubstr;

std::string job() {
  return std::string("job ") + std::to_string(getpid()) + " " +
         ::testing::UnitTest::GetInstance()->current_test_info()->name();
}

TEST(LocalSecret, IsHandedOutToProcessesOfThisUser) {
  const LocalSecretServer server(job(), "sesame");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ask_for_local_secret(job(), 60s), "sesame");
  EXPECT_THAT(message_of<Error>([] { LocalSecretServer(job(), "another"); }),
              HasSubstr("handed out: Address already in use"));
}

// It would never end.
TEST(LocalSecret, AServerWithTooFewDescriptorsIsRefused) {
  test::in_a_child([] {
    const int next = Fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)).get();
    rlimit one{};
    getrlimit(RLIMIT_NOFILE, &one);
    one.rlim_cur = static_cast<rlim_t>(next) + 1;
    setrlimit(RLIMIT_NOFILE, &one);
    EXPECT_THAT(message_of<Error>([] { LocalSecretServer(job(), "sesame"); }),
                HasSubstr("handed out: Too many open files"));
  });
}

TEST(LocalSecret, IsWaitedFor) {
  std::string got;
  std::thread asks([&] { got = ask_for_local_secret(job(), 60s); });
  const LocalSecretServer server(job(), "sesame");
  asks.join();
  EXPECT_EQ(got, "sesame");
  EXPECT_THAT(message_of<CommError>([] { ask_for_local_secret("of no process", 0s); }),
              HasSubstr("no secret of the job from rank 0 on this host after 0 s: Connection"));
}

TEST(LocalSecret, IsNotHandedOutToAnotherUser) {
  const LocalSecretServer server(job(), "sesame");
  peers_are_others = true;
  const Fd one(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto [address, length] = abstract_address(
      fmt::format("lockstep-secret-{}-{:016x}", geteuid(), fnv1a<uint64_t>(job())));
  ASSERT_EQ(connect(one.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  char byte = 0;
  EXPECT_EQ(recv(one.get(), &byte, 1, 0), 0);
  EXPECT_THAT(message_of<CommError>([] { ask_for_local_secret(job(), 10min); }),
              HasSubstr("a process of another user is in rank 0's place"));
  peers_are_others = false;
}

// Rank 0 of two that mpirun has started here.
TEST(LocalSecret, IsThatOfRanksOnOneHost) {
  const Place place{.rank = 0,
                    .size = 2,
                    .local_size = 2,
                    .host = kLoopback,
                    .port = 20'000,
                    .source = "MPICH",
                    .job = job()};
  const std::string secret = agreed_secret(place, 60s);
  EXPECT_EQ(secret.size(), 64U);
  // The first World could not be made.
  EXPECT_EQ(agreed_secret(place, 60s), secret);
  const std::string served = place.job + " 20000";
  EXPECT_EQ(ask_for_local_secret(served, 60s), secret);
  // A job of another container, where mpirun has the same process number, at a port of its own.
  Place other = place;
  other.port = 20'001;
  EXPECT_NE(agreed_secret(other, 60s), secret);
  end_serving(other);
  EXPECT_EQ(ask_for_local_secret(served, 60s), secret);
  end_serving(place);
  EXPECT_THROW(ask_for_local_secret(served, 0s), CommError);
  Place plain = place;
  plain.source = kPlainLauncher;
  EXPECT_EQ(agreed_secret(plain, 60s), "");
}

}  // namespace
}  // namespace lockstep

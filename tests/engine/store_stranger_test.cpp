// What strangers do at the key-value store's port, and a server that stands still.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <thread>

#include "comm/store/client.h"
#include "comm/store/server.h"
#include "core/security/tls.h"
#include "core/security/token.h"
#include "engine/deadline.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using test::message_of;
using testing::HasSubstr;

Digest key_of(char byte) {
  Digest key;
  key.fill(static_cast<uint8_t>(byte));
  return key;
}

class StoreStranger : public testing::Test {
 protected:
  void serve(std::optional<Digest> key = std::nullopt) {
    test::LoopbackSocket socket;
    port_ = socket.port;
    server_.emplace(std::move(socket.listen().fd), std::move(key));
  }
  StoreClient client(std::optional<Digest> key = std::nullopt) const {
    return StoreClient("127.0.0.1", port_, in(60s), {}, std::move(key));
  }
  // Whether the server closes it rather than answer.
  static bool is_sent_away(const Fd& fd) {
    char byte;
    return recv(fd.get(), &byte, 1, 0) <= 0;
  }

  int port_ = 0;
  std::optional<StoreServer> server_;
};

TEST_F(StoreStranger, IdleConnectionsLeaveRoomForRanks) {
  serve(key_of(1));
  std::vector<Fd> idle;
  Tls tls(Tls::Role::Client, key_of(1));
  tls.write("x");
  const std::string hello = tls.take_output();
  for (int i = 0; i < 300; ++i) {
    idle.push_back(test::connection_to(port_));
    // Each second one falls silent in the middle of a handshake.
    if (i % 2 == 0) {
      EXPECT_GT(send(idle.back().get(), hello.data(), hello.size() / 2, 0), 0);
    }
  }
  StoreClient rank = client(key_of(1));
  EXPECT_EQ(rank.add("count", 1, in(10s)), 1);
  // The first have made room.
  EXPECT_TRUE(is_sent_away(idle.front()));
  EXPECT_EQ(rank.add("count", 1, in(10s)), 2);
}

// With as few descriptors as a process may have, in a process of its own.
TEST_F(StoreStranger, IdleConnectionsDoNotTakeTheLastDescriptor) {
  test::LoopbackSocket socket;
  port_ = socket.port;
  socket.listen();
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit few{64, 64};
    setrlimit(RLIMIT_NOFILE, &few);
    const StoreServer serves(std::move(socket.fd));
    for (;;) pause();
  }
  socket.fd.reset();
  std::vector<Fd> idle;
  for (int i = 0; i < 100; ++i) idle.push_back(test::connection_to(port_));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client().add("count", 1, in(10s)), i + 1);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

TEST_F(StoreStranger, OnlyWhoHasTheSecretIsServed) {
  serve(key_of(1));
  StoreClient rank = client(key_of(1));
  rank.set("k", "v", in(10s));
  EXPECT_EQ(rank.get({"k"}, in(10s)).front(), "v");
  EXPECT_THAT(message_of<StoreFailure>([&] { StoreClient("127.0.0.1", port_, in(1s)); }),
              HasSubstr("serves only ranks that have the job's secret"));
  EXPECT_THAT(
      message_of<StoreFailure>([&] { StoreClient("127.0.0.1", port_, in(1s), {}, key_of(2)); }),
      HasSubstr("secret"));
  // Neither read nor written: the requests come before anything was proved.
  const Fd fd = test::connection_to(port_);
  const std::string bytes = StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
                            StoreMessage(StoreQuery::Set).text("k").text("poison").bytes();
  ASSERT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  uint32_t refusal = 0;
  ASSERT_EQ(recv(fd.get(), &refusal, sizeof refusal, MSG_WAITALL),
            static_cast<ssize_t>(sizeof refusal));
  EXPECT_EQ(refusal, kNeedsKey);
  EXPECT_TRUE(is_sent_away(fd));
  EXPECT_EQ(rank.get({"k"}, in(10s)).front(), "v");
}

TEST_F(StoreStranger, WhatWasSaidIsNotHiddenByATryThatTheDeadlineCutsShort) {
  test::LoopbackSocket socket;
  port_ = socket.port;
  socket.listen();
  std::thread server([&] {
    const Fd first(accept(socket.fd.get(), nullptr, nullptr));  // later connections get no answer
    const uint32_t refusal = kNeedsKey;
    send(first.get(), &refusal, sizeof refusal, MSG_NOSIGNAL);
    char byte;
    while (recv(first.get(), &byte, 1, 0) > 0) continue;
  });
  EXPECT_THAT(message_of<StoreFailure>([&] { StoreClient("127.0.0.1", port_, in(900ms)); }),
              HasSubstr("serves only ranks that have the job's secret"));
  server.join();
}

TEST_F(StoreStranger, WhoHasASecretDoesNotTrustAServerWithoutIt) {
  serve();
  EXPECT_THAT(
      message_of<StoreFailure>([&] { StoreClient("127.0.0.1", port_, in(1s), {}, key_of(1)); }),
      HasSubstr("it has none, or another"));
}

TEST_F(StoreStranger, LargeValuesAndAllCallsGoOverTls) {
  serve(key_of(7));
  StoreClient one = client(key_of(7));
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{16384}, size_t{16385}, size_t{5'000'000}}) {
    const std::string value(size, 'v');
    one.set("value", value, in(60s));
    EXPECT_EQ(one.get({"value"}, in(60s)).front(), value) << size;
  }
  EXPECT_THAT(message_of<StoreFailure>([&] { one.wait({"absent"}, in(5ms)); }),
              HasSubstr("no rank has set it"));
  EXPECT_EQ(one.compare_set("k", "", "x", in(10s)), "x");
}

TEST_F(StoreStranger, ValuesAreTakenUpToALimitAndRanksStillMeet) {
  serve();
  StoreClient rank = client();
  rank.set("before", "1", in(10s));
  {
    const std::string value(8 << 20, 'x');
    std::optional<StoreClient> stranger(std::in_place, "127.0.0.1", port_, in(60s));
    // 1.2 GB.
    for (int i = 0; i < 150; ++i) {
      try {
        if (!stranger) stranger.emplace("127.0.0.1", port_, in(60s));
        stranger->set("poison" + std::to_string(i), value, in(60s));
      } catch (const StoreFailure&) {
        stranger.reset();
      }
    }
  }
  // 256 MiB of them, and the rank's own.
  EXPECT_LE(rank.count_keys(in(10s)), 32 + 1);
  rank.set("member/0", "who I am", in(10s));
  EXPECT_EQ(rank.get({"before", "member/0"}, in(10s)), (std::vector<std::string>{"1", "who I am"}));
}

TEST_F(StoreStranger, ATextWithoutEndIsNotKept) {
  serve();
  const Fd fd = test::connection_to(port_);
  const std::string head = StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
                           StoreMessage(StoreQuery::MultiSet).number(uint64_t{1} << 20).bytes();
  const std::string text = StoreMessage().text(std::string(1 << 20, 'x')).bytes();
  EXPECT_GT(send(fd.get(), head.data(), head.size(), MSG_NOSIGNAL), 0);
  int taken = 0;
  while (send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size())) {
    ASSERT_LT(++taken, 200);
  }
  EXPECT_EQ(client().add("count", 1, in(10s)), 1);
}

// As a rank that is killed: the server finds out in the middle of what it answers.
TEST_F(StoreStranger, WhoBreaksOffIsDroppedAndNoOther) {
  serve();
  StoreClient rank = client();
  std::string bytes = StoreMessage(StoreQuery::Validate).number(kMagic).bytes();
  for (uint32_t i = 0; i < 3000; ++i) bytes += StoreMessage(StoreQuery::Ping).number(i).bytes();
  for (int i = 0; i < 20; ++i) {
    const Fd fd = test::connection_to(port_);
    ASSERT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    const linger at_once{1, 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  }
  for (int i = 0; i < 20; ++i) EXPECT_EQ(rank.add("count", 1, in(60s)), i + 1);
}

// The server runs in a process of its own, which is stopped for longer than a cancelled wait is
// answered.
TEST_F(StoreStranger, AServerThatStandsStillIsNotLost) {
  test::LoopbackSocket socket;
  port_ = socket.port;
  socket.listen();
  const pid_t pid = fork();
  if (pid == 0) {
    const StoreServer serves(std::move(socket.fd), key_of(1));
    for (;;) pause();
  }
  socket.fd.reset();
  StoreClient waits = client(key_of(1)), board = client(key_of(1));
  kill(pid, SIGSTOP);
  EXPECT_THAT(message_of<StoreFailure>([&] { waits.wait({"absent"}, in(50ms)); }),
              HasSubstr("is stopped"));
  // A call that is not answered in time closes the connection; the next makes another.
  EXPECT_THAT(message_of<StoreFailure>([&] { board.add("count", 1, in(50ms)); }),
              HasSubstr("is stopped"));
  kill(pid, SIGCONT);
  EXPECT_THAT(message_of<StoreFailure>([&] { waits.wait({"absent"}, in(50ms)); }),
              HasSubstr("no rank has set it"));
  waits.set("there", "1", in(60s));
  waits.wait({"there"}, in(60s));
  EXPECT_EQ(waits.get({"there"}, in(60s)).front(), "1");
  EXPECT_GT(board.add("count", 1, in(60s)), 0);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

TEST(JobKey, ComesFromTheLauncherOrFollowsFromTheToken) {
  for (const char* name : {"LOCKSTEP_JOB_KEY", "LOCKSTEP_TOKEN", "LOCKSTEP_TOKEN_FILE"})
    unsetenv(name);
  EXPECT_FALSE(job_key_from_env("job"));
  setenv("LOCKSTEP_TOKEN", "0123456789abcdef", 1);
  const auto one = job_key_from_env("job"), other = job_key_from_env("another");
  ASSERT_TRUE(one && other);
  EXPECT_NE(*one, *other);
  setenv("LOCKSTEP_JOB_KEY", hex_of(key_of(0x5a)).c_str(), 1);
  EXPECT_EQ(job_key_from_env("job"), key_of(0x5a));
  setenv("LOCKSTEP_JOB_KEY", "5a5a", 1);
  EXPECT_THAT(message_of<ConfigError>([] { (void)job_key_from_env("job"); }),
              HasSubstr("LOCKSTEP_JOB_KEY has 4 characters"));
  unsetenv("LOCKSTEP_JOB_KEY");
  unsetenv("LOCKSTEP_TOKEN");
}

}  // namespace
}  // namespace lockstep::comm

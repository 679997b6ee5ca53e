#include "comm/store/store.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <chrono>
#include <cstdlib>

#include "comm/store/client.h"
#include "comm/store/protocol.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::LoopbackSocket;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

Store served(std::chrono::milliseconds timeout = 5s) {
  LoopbackSocket socket;
  return Store::connect({.host = "127.0.0.1",
                         .port = socket.port,
                         .server = true,
                         .timeout = timeout,
                         .listen_fd = socket.listen().fd.release()});
}

TEST(Store, KeepsWhatIsSet) {
  const Store store = served();
  store.set("key", std::string_view("a\0b", 3));
  EXPECT_EQ(store.get("key", 1s), std::string("a\0b", 3));
  EXPECT_TRUE(store.check({"key"}));
  EXPECT_FALSE(store.check({"key", "other"}));
  EXPECT_EQ(store.add("count", 2), 2);
  EXPECT_EQ(store.add("count", 3), 5);
}

TEST(Store, PrefixesKeepKeysApart) {
  const Store store = served();
  store.prefix("a").set("key", "1");
  EXPECT_FALSE(store.prefix("b").check({"key"}));
  EXPECT_EQ(store.get("a/key", 1s), "1");
  EXPECT_EQ(store.prefix("a").clone(1s).get("key", 1s), "1");
}

TEST(Store, AKeyThatNobodySetsIsNamedAtTheDeadline) {
  const Store store = served();
  EXPECT_THAT(message_of<CommError>([&] { store.get("absent", 50ms); }),
              AllOf(HasSubstr("wait for absent"), HasSubstr(store.address()),
                    HasSubstr("no rank has set it in time; look at whether the rank that sets it "
                              "still runs")));
  EXPECT_FALSE(store.check({"absent"}));  // still usable
}

// A queue is there, but has no value: as a key that another rank has removed after the wait for it.
TEST(Store, AGetOfWhatIsRemovedMeanwhileEndsAtItsOwnDeadline) {
  const Store store = served(30s);
  const Fd fd = test::connection_to(store.port());
  const std::string push =
      StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
      StoreMessage(StoreQuery::Push).text(std::string(kUsers) + "queue").text("1").bytes();
  ASSERT_EQ(send(fd.get(), push.data(), push.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(push.size()));
  store.wait({"queue"}, 30s);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(message_of<CommError>([&] { (void)store.get("queue", 1ms); }),
              HasSubstr("another client has removed"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 25s);
  EXPECT_EQ(store.add("count", 1), 1);  // still usable
}

TEST(Store, NobodyListeningSaysWhereAndWhatToDo) {
  const LoopbackSocket silent;
  const std::string error = message_of<CommError>(
      [&] { (void)Store::connect({.host = "127.0.0.1", .port = silent.port, .timeout = 300ms}); });
  EXPECT_THAT(error, AllOf(HasSubstr("127.0.0.1:" + std::to_string(silent.port)),
                           HasSubstr("within 0.3 s"), HasSubstr("MASTER_ADDR")));
}

// Of a large job, one rank of each host warns before the deadline.
TEST(Store, OneRankOfAHostWarnsThatNobodyListens) {
  for (const char* local_rank : {"0", "1"}) {
    test::isolated([local_rank] {
      setenv("RANK", *local_rank == '0' ? "2" : "3", 1);
      setenv("WORLD_SIZE", "4", 1);
      setenv("LOCAL_RANK", local_rank, 1);
      setenv("LOCAL_WORLD_SIZE", "2", 1);
      const LoopbackSocket silent;
      testing::internal::CaptureStderr();
      EXPECT_THROW((void)Store::connect({.host = "127.0.0.1", .port = silent.port, .timeout = 2s}),
                   CommError);
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_EQ(said.find("cannot be reached yet") != said.npos, *local_rank == '0') << said;
    });
  }
}

// As rank 0's does when it is stopped before it serves: the kernel takes the connection.
TEST(Store, AServerThatNeverAnswersIsADeadline) {
  LoopbackSocket silent;
  silent.listen();
  const std::string error = message_of<CommError>(
      [&] { (void)Store::connect({.host = "127.0.0.1", .port = silent.port, .timeout = 300ms}); });
  EXPECT_THAT(error, AllOf(HasSubstr("127.0.0.1:" + std::to_string(silent.port)),
                           HasSubstr("no answer: the process that serves it")));
}

TEST(Store, B67_AnswersPythonAsItsOwnDoes) {
  const Store store = served();
  store.set("from_cpp", "1");
  const std::string command = fmt::format("{} {}/tests/comm/store/python_peer.py {}",
                                          LOCKSTEP_PEERS_PYTHON, LOCKSTEP_SOURCE_DIR, store.port());
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(store.get("from_python", 1s), "2");
}

// torch.distributed's stores are open to all, and count their ranks under this key.
TEST(Store, AStoreThatCannotCountItsRanksIsRefused) {
  const Store store = served();
  const auto deadline = StoreClient::Clock::now() + 5s;
  StoreClient("127.0.0.1", store.port(), deadline).set_confirmed(kArrivals, "many", deadline);
  const std::string error = message_of<ConfigError>(
      [&] { (void)Store::connect({.host = "127.0.0.1", .port = store.port(), .timeout = 5s}); });
  EXPECT_THAT(error,
              AllOf(HasSubstr(store.address()), HasSubstr("init/): its value is not a number"),
                    HasSubstr("MASTER_PORT")));
}

TEST(Store, APortInUseIsSaidToBe) {
  LoopbackSocket taken;
  taken.listen();
  const std::string error = message_of<CommError>([&] {
    (void)Store::connect(
        {.host = "127.0.0.1", .port = taken.port, .server = true, .timeout = 300ms});
  });
  EXPECT_THAT(error, AllOf(HasSubstr("another process listens"), HasSubstr("MASTER_PORT")));
}

TEST(Store, AHostThatDoesNotExistIsNamed) {
  const std::string error = message_of<CommError>(
      [&] { (void)Store::connect({.host = "no-such-host.invalid", .port = 1, .timeout = 300ms}); });
  EXPECT_THAT(error, AllOf(HasSubstr("no-such-host.invalid:1"), HasSubstr("MASTER_ADDR")));
}

}  // namespace
}  // namespace lockstep::comm

#include "comm/store.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;

// A socket on a free port of the loopback interface.
struct Socket {
  Socket() : fd(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port = ntohs(address.sin_port);
  }
  ~Socket() {
    if (fd >= 0) close(fd);
  }
  // The descriptor, listening and no longer this object's.
  int listening() {
    EXPECT_EQ(listen(fd, 16), 0);
    return std::exchange(fd, -1);
  }

  int fd;
  int port = 0;
};

Store served(std::chrono::milliseconds timeout = 5s) {
  Socket socket;
  const int port = socket.port;
  return Store::connect({.host = "127.0.0.1",
                         .port = port,
                         .server = true,
                         .timeout = timeout,
                         .listen_fd = socket.listening()});
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
              AllOf(HasSubstr("wait for absent"), HasSubstr(store.address())));
  EXPECT_FALSE(store.check({"absent"}));  // still usable
}

TEST(Store, NobodyListeningSaysWhereAndWhatToDo) {
  const Socket silent;
  const std::string error = message_of<CommError>(
      [&] { (void)Store::connect({.host = "127.0.0.1", .port = silent.port, .timeout = 300ms}); });
  EXPECT_THAT(error, AllOf(HasSubstr("127.0.0.1:" + std::to_string(silent.port)),
                           HasSubstr("within 0.3 s"), HasSubstr("MASTER_ADDR")));
}

// As rank 0's does when it is stopped before it serves: the kernel takes the connection.
TEST(Store, AServerThatNeverAnswersIsADeadline) {
  const Socket silent;
  ASSERT_EQ(listen(silent.fd, 16), 0);
  const std::string error = message_of<CommError>(
      [&] { (void)Store::connect({.host = "127.0.0.1", .port = silent.port, .timeout = 300ms}); });
  EXPECT_THAT(error, AllOf(HasSubstr("127.0.0.1:" + std::to_string(silent.port)),
                           HasSubstr("no answer: the process that serves it")));
}

TEST(Store, B67_AnswersPythonAsItsOwnDoes) {
  const Store store = served();
  store.set("from_cpp", "1");
  const std::string command = fmt::format("{} {}/tests/comm/store_python_peer.py {}",
                                          LOCKSTEP_PEERS_PYTHON, LOCKSTEP_SOURCE_DIR, store.port());
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(store.get("from_python", 1s), "2");
}

TEST(Store, APortInUseIsSaidToBe) {
  const Socket taken;
  ASSERT_EQ(listen(taken.fd, 1), 0);
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

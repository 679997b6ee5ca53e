// A job's secret that one process hands out to others by MUNGE, and what an attacker at the port
// can do. Of two hosts and two users: tests/system/schedulers_test.py.
#include "core/security/job_secret.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/network/address.h"
#include "core/place/secret.h"
#include "core/place/sources.h"
#include "core/security/munge.h"
#include "lockstep/core/error.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace {
std::atomic<int> refusals = 0;  // of accept4(), while a connection waits
}  // namespace

// In the place of the system's.
extern "C" int accept4(int socket, sockaddr* address, socklen_t* length, int flags) {
  pollfd waits{socket, POLLIN, 0};
  if (refusals == 0 || poll(&waits, 1, 0) == 0) {
    return static_cast<int>(syscall(SYS_accept4, socket, address, length, flags));
  }
  --refusals;
  errno = ENOBUFS;
  return -1;
}

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using test::message_of;
using ::testing::HasSubstr;

constexpr const char* kHost = "127.0.0.1";

// A daemon of MUNGE for this process, under a key of its own.
class JobSecret : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new test::Folder;
    const std::string key = *folder_ / "key", socket = *folder_ / "socket";
    std::ofstream(key) << std::string(64, 'k');
    chmod(key.c_str(), 0600);
    daemon_ = fork();
    if (daemon_ == 0) {
      const std::string pid = "--pid-file=" + *folder_ / "pid",
                        log = "--log-file=" + *folder_ / "log",
                        seed = "--seed-file=" + *folder_ / "seed";
      execlp("munged", "munged", "--foreground", "--force", ("--key-file=" + key).c_str(),
             ("--socket=" + socket).c_str(), pid.c_str(), log.c_str(), seed.c_str(), nullptr);
      _exit(127);
    }
    while (!std::filesystem::exists(socket)) {
      ASSERT_EQ(waitpid(daemon_, nullptr, WNOHANG), 0) << "munged has ended";
      std::this_thread::sleep_for(1ms);
    }
    std::ofstream(*folder_ / "slurm.conf") << "AuthInfo=socket=" << socket << "\n";
    setenv("SLURM_CONF", (*folder_ / "slurm.conf").c_str(), 1);
  }
  static void TearDownTestSuite() {
    kill(daemon_, SIGKILL);
    waitpid(daemon_, nullptr, 0);
    delete folder_;
  }

 private:
  static inline test::Folder* folder_;
  static inline pid_t daemon_;
};

// A server at a free port, which another program may take before it does.
struct Serving {
  explicit Serving(const std::string& job) {
    while (!server) {
      port = local_address(listen_at(Address::loopback(0))->get()).port();
      try {
        server = std::make_unique<SecretServer>(port, job, "sesame");
      } catch (const Error&) {
      }
    }
  }
  uint16_t port = 0;
  std::unique_ptr<SecretServer> server = nullptr;
};

Fd connected_to(uint16_t port) {
  const Address address = Address::loopback(port);
  Fd one(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(one.get(), address.generic(), address.length), 0);
  return one;
}

// Listens in the place of the job's process; `answers` has each connection.
class Stranger {
 public:
  explicit Stranger(std::function<void(int)> answers)
      : thread_([this, answers = std::move(answers)] {
          for (;;) {
            const Fd one(accept(listening_->get(), nullptr, nullptr));
            if (!one) return;
            answers(one.get());
          }
        }) {}
  ~Stranger() {
    shutdown(listening_->get(), SHUT_RDWR);
    thread_.join();
  }
  uint16_t port() const { return local_address(listening_->get()).port(); }

 private:
  std::optional<Fd> listening_ = listen_at(Address::loopback(0));
  std::thread thread_;
};

TEST_F(JobSecret, IsHandedOutToWhoAsksForTheJob) {
  const Serving one("job 1");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(ask_for_secret(kHost, one.port, "job 1", 60s), "sesame");
  EXPECT_THAT(message_of<CommError>([&] { ask_for_secret(kHost, one.port, "job 2", 0s); }),
              HasSubstr("it serves another job, or is not of this user"));
  EXPECT_THAT(message_of<Error>([&] { SecretServer(one.port, "job 3", "sesame"); }),
              HasSubstr("where the job's secret is handed out: Address already in use"));
}

// Where accept() finds no memory for a connection, the server waits before it tries again.
TEST_F(JobSecret, IsHandedOutOnceTheSystemHasRoomForAConnection) {
  const Serving one("job");
  const auto start = std::chrono::steady_clock::now();
  refusals = 3;
  EXPECT_EQ(ask_for_secret(kHost, one.port, "job", 60s), "sesame");
  EXPECT_EQ(refusals, 0);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 300ms);
}

TEST_F(JobSecret, IsNotWaitedForWhereThereIsNone) {
  std::optional<SecretServer> server;
  uint16_t port = 0;
  while (!server) {
    port = local_address(listen_at(Address::loopback(0))->get()).port();
    try {
      server.emplace(port, SecretServer::None());
    } catch (const Error&) {
    }
  }
  EXPECT_THAT(message_of<CommError>([&] { ask_for_secret(kHost, port, "job", 10min); }),
              HasSubstr("that host has no MUNGE, and this one has"));
}

// A rank 0 of two hosts, as Slurm has started it, whose port another program may have.
TEST_F(JobSecret, IsServedUntilAllRanksHaveMet) {
  Place place{.rank = 0, .size = 2, .local_size = 1, .host = kHost, .source = "Slurm"};
  std::string secret;
  for (int i = 0; secret.empty(); ++i) {
    place.job = "job " + std::to_string(getpid()) + " " + std::to_string(i);
    try {
      secret = agreed_secret(place, 60s);
    } catch (const ConfigError&) {
    }
  }
  // The first World could not be made.
  const uint16_t port = secret_port_of(place.job, place.port);
  EXPECT_EQ(agreed_secret(place, 60s), secret);
  EXPECT_EQ(ask_for_secret(kHost, port, place.job, 60s), secret);
  end_serving(place);
  EXPECT_THAT(message_of<CommError>([&] { ask_for_secret(kHost, port, place.job, 0s); }),
              HasSubstr("no secret of the job"));
  EXPECT_EQ(agreed_secret(place, 60s), secret);
}

// Clients that say nothing do not keep others out.
TEST_F(JobSecret, IsHandedOutBesideManyConnections) {
  const Serving one("job");
  std::vector<Fd> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(connected_to(one.port));
  EXPECT_EQ(ask_for_secret(kHost, one.port, "job", 60s), "sesame");
}

// As many ranks do at once. Again where a busy machine let more time pass than each has.
TEST_F(JobSecret, IsHandedOutToWhoHasConnectedLongBeforeHeAsks) {
  const Serving one("job");
  using Clock = std::chrono::steady_clock;
  for (auto took = Clock::duration::max(); took > 1s;) {
    const auto start = Clock::now();
    const Fd first = connected_to(one.port);
    std::vector<Fd> later;
    for (int i = 0; i < 200; ++i) later.push_back(connected_to(one.port));
    const std::string request = munge::seal("lockstep secret 1\njob\n1234\n");
    const auto length = static_cast<uint32_t>(request.size());
    static_cast<void>(send(first.get(), &length, sizeof length, MSG_NOSIGNAL));
    static_cast<void>(send(first.get(), request.data(), request.size(), MSG_NOSIGNAL));
    char byte = 0;
    const ssize_t got = recv(first.get(), &byte, 1, 0);
    took = Clock::now() - start;
    if (took > 1s) continue;
    EXPECT_EQ(got, 1);
  }
}

// What this user has sealed is also the request itself.
TEST_F(JobSecret, IsNotTheRequestThatAStrangerSendsBack) {
  const Stranger echo([](int fd) {
    char bytes[4096];
    for (ssize_t got; (got = recv(fd, bytes, sizeof bytes, 0)) > 0;)
      static_cast<void>(send(fd, bytes, static_cast<size_t>(got), MSG_NOSIGNAL));
  });
  EXPECT_THAT(message_of<CommError>([&] { ask_for_secret(kHost, echo.port(), "job", 0s); }),
              HasSubstr("an answer without a secret"));
}

TEST_F(JobSecret, IsNotWaitedForWhereAStrangerSaysAByteNowAndThen) {
  int told = 0;
  constexpr int kAll = 8000;
  {
    const Stranger slow([&](int fd) {
      const uint32_t length = kAll;
      static_cast<void>(send(fd, &length, sizeof length, MSG_NOSIGNAL));
      for (; told < kAll && send(fd, "x", 1, MSG_NOSIGNAL) == 1; ++told)
        std::this_thread::sleep_for(10ms);
    });
    EXPECT_THAT(message_of<CommError>([&] { ask_for_secret(kHost, slow.port(), "job", 0s); }),
                HasSubstr("no answer"));
  }
  EXPECT_LT(told, kAll);
}

}  // namespace
}  // namespace lockstep

// Rank 0, which serves the store, comes to its end while other ranks still need it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "comm/store/client.h"
#include "comm/store/server.h"
#include "lockstep/comm/join.h"
#include "lockstep/core/error.h"
#include "support/loopback.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Whether somebody listens there.
Fd connected_to(int port) {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = loopback(port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    fd.reset();
  return fd;
}

[[noreturn]] void forward(const Fd& listening, int port) {
  std::deque<std::array<Fd, 2>> pairs;
  for (;;) {
    std::vector<pollfd> all = {{listening.get(), POLLIN, 0}};
    for (const auto& pair : pairs) {
      for (const Fd& end : pair) all.push_back({end.get(), POLLIN, 0});
    }
    poll(all.data(), all.size(), -1);
    for (size_t i = 1; i < all.size(); ++i) {
      if (all[i].revents == 0) continue;
      auto& pair = pairs[(i - 1) / 2];
      char bytes[1 << 16];
      const ssize_t count = recv(all[i].fd, bytes, sizeof bytes, 0);
      std::this_thread::sleep_for(15ms);
      if (count > 0) {
        send(pair[i % 2].get(), bytes, static_cast<size_t>(count), MSG_NOSIGNAL);
      } else {
        shutdown(pair[i % 2].get(), SHUT_RDWR);
        pair[0].reset();  // poll() leaves out what is -1
        pair[1].reset();
      }
    }
    if (all[0].revents != 0) {
      pairs.push_back({Fd(accept(listening.get(), nullptr, nullptr)), connected_to(port)});
    }
  }
}

// From now on the store answers this rank late, by way of a process that ends with it.
void take_the_slow_way() {
  LoopbackSocket socket;
  socket.listen();
  if (fork() == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    forward(socket.fd, std::atoi(getenv("MASTER_PORT")));
  }
  setenv("MASTER_PORT", std::to_string(socket.port).c_str(), 1);
}

// Which the other one learns before rank 0 has waited for it in vain.
TEST(StoreEnd, ARankThatLeavesIsMissedByOneThatSplitsTheGroup) {
  spawn_bare(2,
             [](int rank) {
               std::optional<World> world(World::from_env());
               world->group().barrier().wait();
               if (rank > 0) {
                 EXPECT_THROW((void)world->group().split(0), CommError);
                 return;
               }
               const auto deadline = std::chrono::steady_clock::now() + 60s;
               comm::StoreClient client("127.0.0.1", std::atoi(getenv("MASTER_PORT")), deadline);
               while (client.add(comm::kMaking, 0, deadline) == 0) std::this_thread::yield();
               const auto start = std::chrono::steady_clock::now();
               world.reset();
               EXPECT_LT(std::chrono::steady_clock::now() - start, comm::StoreServer::kLinger);
             },
             {.backend = "tcp"});
}

TEST(StoreEnd, ARankThatIsFirstLeavesTheOthersTimeToMakeTheirGroup) {
  for (const char* backend : {"tcp", "gloo"}) {
    spawn_bare(3,
               [](int rank) {
                 if (rank > 0) take_the_slow_way();
                 const World world = World::from_env();
                 const Group part = world.group().split(rank == 0 ? 0 : 1);
                 part.barrier().wait();
               },
               {.backend = backend});
  }
}

// Rank 2 comes when the others have disagreed, by a store at `port`, or the world's.
void expect_that_who_is_late_learns_why(
    std::optional<int> port,
    const std::function<void(int rank, std::chrono::milliseconds)>& start) {
  int refused[2];
  ASSERT_EQ(pipe2(refused, O_CLOEXEC), 0);
  spawn_bare(3,
             [&](int rank) {
               if (rank == 1) setenv("LOCKSTEP_BACKEND", "gloo", 1);
               if (rank == 2) {
                 char byte;
                 EXPECT_EQ(read(refused[0], &byte, 1), 1);
                 // Until rank 0 has ended, if it does.
                 const int there = port ? *port : std::atoi(getenv("MASTER_PORT"));
                 const auto end = std::chrono::steady_clock::now() + 300ms;
                 while (connected_to(there) && std::chrono::steady_clock::now() < end) {
                   std::this_thread::sleep_for(10ms);
                 }
               }
               EXPECT_THAT([&] { start(rank, rank == 2 ? 20'000ms : 60'000ms); },
                           ThrowsMessage<ConfigError>(HasSubstr("LOCKSTEP_BACKEND=gloo")));
               if (rank == 1) {
                 EXPECT_EQ(write(refused[1], "x", 1), 1);
               }
               std::exit(0);
             },
             {.backend = "tcp"});
  close(refused[0]);
  close(refused[1]);
}

TEST(StoreEnd, ARankThatIsLateLearnsWhyTheOthersHaveEnded) {
  expect_that_who_is_late_learns_why(
      std::nullopt, [](int, auto timeout) { World::from_env({.timeout = timeout}); });
}

TEST(StoreEnd, ARankThatJoinsLateLearnsWhyTheOthersHaveEnded) {
  LoopbackSocket free;
  free.listen();
  const int port = free.port;
  free.fd.reset();
  expect_that_who_is_late_learns_why(port, [port](int rank, auto timeout) {
    comm::join_group("127.0.0.1:" + std::to_string(port), {rank, 3}, {.timeout = timeout});
  });
}

}  // namespace
}  // namespace lockstep::test

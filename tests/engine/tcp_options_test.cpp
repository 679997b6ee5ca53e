// What the kernel is told of the connections between ranks.
#include "core/network/tcp_options.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>

#include "comm/net/ops.h"
#include "core/files/fd.h"
#include "engine/net_ranks.h"

namespace lockstep {
namespace {

constexpr int kRtoMaxMs = 44;  // Linux 6.15

int option_of(int socket, int level, int option) {
  int value = -1;
  socklen_t length = sizeof value;
  return getsockopt(socket, level, option, &value, &length) == 0 ? value : -1;
}

Fd tcp_socket() { return Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

bool limits_pauses() {
  const int ms = 1000;
  return setsockopt(tcp_socket().get(), IPPROTO_TCP, kRtoMaxMs, &ms, sizeof ms) == 0;
}

TEST(TcpOptions, PausesAreShortAndConnectionsLastAsLongAsDeadlines) {
  const int before = option_of(tcp_socket().get(), IPPROTO_TCP, TCP_SYNCNT);
  for (const int minutes : {1, 15, 90}) {
    const Fd one = tcp_socket();
    settle_connection(one.get(), std::chrono::minutes(minutes));
    EXPECT_EQ(option_of(one.get(), IPPROTO_TCP, TCP_NODELAY), 1);
    EXPECT_EQ(option_of(one.get(), SOL_SOCKET, SO_KEEPALIVE), 1);
    // Asked before a router forgets the connection, and for as long as what is sent is sent again.
    const int pause = option_of(one.get(), IPPROTO_TCP, TCP_KEEPINTVL);
    EXPECT_LT(option_of(one.get(), IPPROTO_TCP, TCP_KEEPIDLE), 60);
    EXPECT_LT(pause, 60);
    EXPECT_EQ(option_of(one.get(), IPPROTO_TCP, TCP_KEEPCNT) * pause,
              std::min(std::max(minutes, 15) * 60, 127 * pause));
    // Without shorter pauses the kernel's own limit of attempts is right.
    const bool shorter = limits_pauses();
    EXPECT_EQ(option_of(one.get(), IPPROTO_TCP, kRtoMaxMs), shorter ? 1000 : -1);
    EXPECT_EQ(option_of(one.get(), IPPROTO_TCP, TCP_USER_TIMEOUT),
              shorter ? std::max(minutes, 15) * 60'000 : 0);
    EXPECT_EQ(option_of(one.get(), IPPROTO_TCP, TCP_SYNCNT), shorter ? 127 : before);
  }
  const Fd longest = tcp_socket();
  settle_connection(longest.get(), std::chrono::hours(24 * 365));
  EXPECT_GE(option_of(longest.get(), IPPROTO_TCP, TCP_USER_TIMEOUT), 0);
}

TEST(TcpOptions, BothEndsOfARanksConnectionHaveThem) {
  comm::Ranks ranks(2);
  const Fd settled = tcp_socket();
  settle_connection(settled.get());
  ranks.run([&](comm::NetGroup& group, int rank) {
    comm::Caller caller(group);
    caller.call([](const comm::NetPort& port) { comm::net::barrier(port); });
    if (rank == 0) {
      rlimit limit{};
      getrlimit(RLIMIT_NOFILE, &limit);
      int ends = 0;
      for (int fd = 0; fd < static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 4096)); ++fd) {
        sockaddr_storage peer{};
        socklen_t length = sizeof peer;
        if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
        if (peer.ss_family != AF_INET) continue;
        ++ends;
        for (const int option :
             {TCP_NODELAY, TCP_THIN_LINEAR_TIMEOUTS, TCP_KEEPIDLE, kRtoMaxMs, TCP_USER_TIMEOUT})
          EXPECT_EQ(option_of(fd, IPPROTO_TCP, option),
                    option_of(settled.get(), IPPROTO_TCP, option))
              << option;
      }
      EXPECT_GE(ends, 2);
    }
    caller.call([](const comm::NetPort& port) { comm::net::barrier(port); });
  });
}

}  // namespace
}  // namespace lockstep

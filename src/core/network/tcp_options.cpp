#include "core/network/tcp_options.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace lockstep {
namespace {

// linux/tcp.h of 6.15; netinet/tcp.h does not have it.
constexpr int kRtoMaxMs = 44;
constexpr int kPauseMs = 1000;  // the least that the kernel takes
// So that connecting is tried for as long as without a limit of the pauses.
constexpr int kSyns = 127;
// Routers and firewalls that keep a table of connections forget idle ones, some after a minute,
// most after four to six, and drop what follows. The kernel's default first asks after two hours.
constexpr int kIdleS = 30;
constexpr int64_t kMostProbes = 127;  // the kernel's limit

bool set(int socket, int level, int option, int value) {
  return setsockopt(socket, level, option, &value, sizeof value) == 0;
}

}  // namespace

void settle_connection(int socket, std::chrono::milliseconds unacknowledged) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  const int64_t most = std::numeric_limits<int>::max();
  const int64_t ms = std::max<std::chrono::milliseconds>(unacknowledged, kUnacknowledged).count();
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, kIdleS);
  // An idle connection, too, lasts as long as one on which something is sent.
  set(socket, IPPROTO_TCP, TCP_KEEPCNT,
      static_cast<int>(std::min(ms / 1000 / kIdleS, kMostProbes)));
  if (!set(socket, IPPROTO_TCP, kRtoMaxMs, kPauseMs)) {
    // Of fewer than four segments in flight the pauses do not grow for the first six times. Beside
    // a limit of the pauses it did not help.
    set(socket, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1);
    return;
  }
  // The kernel gives a connection up after this many attempts, which are soon over with short
  // pauses.
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min(ms, most)));
  set(socket, IPPROTO_TCP, TCP_SYNCNT, kSyns);
}

}  // namespace lockstep

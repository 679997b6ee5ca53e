// How the TCP connections between a job's processes behave in the kernel. No torch.
#pragma once

#include <cerrno>
#include <chrono>

namespace lockstep {

// Linux's default ends a connection after some 15 minutes in which nothing was acknowledged.
constexpr std::chrono::minutes kUnacknowledged{15};

// For a socket before it connects, or one that was accepted: what is written leaves at once, a host
// that is gone for good takes its connections along in time, a router that forgets idle connections
// does not come to forget this one, and what the network has lost is sent again every second at
// most (Linux 6.15; before it the pauses double up to two minutes). The connection ends after
// `unacknowledged` without an acknowledgement: at least 15 minutes, and no deadline of its user
// should be longer.
void settle_connection(int socket, std::chrono::milliseconds unacknowledged = kUnacknowledged);

// Whether a call that failed with `error` on a non-blocking socket is to be made again later.
inline bool is_temporary(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

// Whether accept() failed with `error` because the system has no descriptor or memory for another
// connection: the one that waits is still there, and poll() tells of it again at once.
inline bool has_no_room(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace lockstep

#include "core/security/local_secret.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "core/hash/mix.h"
#include "core/network/tcp_options.h"
#include "core/network/unix_address.h"
#include "core/process/thread.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr auto kBetweenTries = 2ms;
constexpr int kRoomPauseMs = 100;  // where the system has no room for another connection
constexpr timeval kAnswerTime{.tv_sec = 2, .tv_usec = 0};

std::pair<sockaddr_un, socklen_t> address_of(const std::string& job) {
  return abstract_address(
      fmt::format("lockstep-secret-{}-{:016x}", geteuid(), fnv1a<uint64_t>(job)));
}

// Whose process is at the other end: of a server, who has called listen().
std::optional<uid_t> user_at(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
  return peer.uid;
}

[[noreturn]] void throw_no_server() {
  throw Error(
      fmt::format("the socket where the job's secret is handed out: {}", std::strerror(errno)));
}

Fd listening_at(const std::string& job) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto [address, length] = address_of(job);
  if (!socket || bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    throw_no_server();
  }
  return socket;
}

// At the other end of a connection.
struct OtherUser {};

// Of one connection.
std::string asked_once(const std::string& job) {
  const Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  for (const int option : {SO_SNDTIMEO, SO_RCVTIMEO}) {
    setsockopt(socket.get(), SOL_SOCKET, option, &kAnswerTime, sizeof kAnswerTime);
  }
  const auto [address, length] = address_of(job);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    throw Error(std::strerror(errno));
  }
  if (user_at(socket.get()) != geteuid()) throw OtherUser();
  std::string got;
  char buffer[256];
  ssize_t count = 0;
  while ((count = recv(socket.get(), buffer, sizeof buffer, 0)) > 0)
    got.append(buffer, static_cast<size_t>(count));
  if (count < 0 || got.empty()) throw Error("no answer");
  return got;
}

}  // namespace

LocalSecretServer::LocalSecretServer(const std::string& job, std::string secret)
    : secret_(std::move(secret)), listening_(listening_at(job)), stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) throw_no_server();  // else the thread would never be told to end
  thread_ = thread_without_signals([this] { serve(); });
}

LocalSecretServer::~LocalSecretServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

void LocalSecretServer::serve() {
  for (;;) {
    pollfd waits[2] = {{stop_.get(), POLLIN, 0}, {listening_.get(), POLLIN, 0}};
    if (poll(waits, 2, -1) < 0 && errno != EINTR) return;
    if (waits[0].revents != 0) return;
    const Fd fd(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (has_no_room(errno)) poll(waits, 1, kRoomPauseMs);
      continue;
    }
    // A new socket has room for it.
    if (user_at(fd.get()) == geteuid())
      send(fd.get(), secret_.data(), secret_.size(), MSG_NOSIGNAL);
  }
}

std::string ask_for_local_secret(const std::string& job, std::chrono::milliseconds timeout) {
  const auto until = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    try {
      return asked_once(job);
    } catch (const OtherUser&) {
      throw CommError("no secret of the job: a process of another user is in rank 0's place");
    } catch (const Error& error) {
      if (std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(kBetweenTries);
        continue;
      }
      throw CommError(
          fmt::format("no secret of the job from rank 0 on this host after {:g} s: {}; look at "
                      "whether it runs",
                      std::chrono::duration<double>(timeout).count(), error.what()));
    }
  }
}

}  // namespace lockstep

#include "core/security/job_secret.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/network/address.h"
#include "core/network/tcp_options.h"
#include "core/process/thread.h"
#include "core/security/munge.h"
#include "core/security/token.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kProtocol = "lockstep secret 1";
constexpr std::string_view kNone = "none";
constexpr size_t kMostClients = 64;
constexpr uint32_t kMostBytes = 8 << 10;  // a credential has some 300
constexpr auto kPatience = 2s;            // with one connection
constexpr auto kBetween = 100ms;

std::string framed(const std::string& credential) {
  const auto length = static_cast<uint32_t>(credential.size());
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + credential;
}

// The whole of a message that has come; throws Error for one that is too long.
std::optional<std::string> unframed(const std::string& bytes) {
  uint32_t length = 0;
  if (bytes.size() < sizeof length) return std::nullopt;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > kMostBytes) throw Error(fmt::format("a credential of {} bytes", length));
  if (bytes.size() < sizeof length + length) return std::nullopt;
  return bytes.substr(sizeof length, length);
}

// What a server has said in the place of a credential.
struct NoSecret {};

std::string request_of(std::string_view job, std::string_view nonce) {
  return fmt::format("{}\n{}\n{}\n", kProtocol, job, nonce);
}

// Of one connection.
std::string asked_once(const Address& server, std::string_view job) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  const Fd socket(::socket(server.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{.tv_sec = kPatience.count(), .tv_usec = 0};
  const auto fail = [&](const char* what) {
    const bool is_late = errno == EAGAIN || errno == EINPROGRESS;
    throw Error(fmt::format("{}: {}", what, is_late ? "no answer" : std::strerror(errno)));
  };
  if (!socket) fail("socket");
  for (const int option : {SO_SNDTIMEO, SO_RCVTIMEO}) {
    setsockopt(socket.get(), SOL_SOCKET, option, &patience, sizeof patience);
  }
  if (connect(socket.get(), server.generic(), server.length) != 0) fail("connect");
  const std::string request = request_of(job, hex_of(random_bytes()));
  const std::string bytes = framed(munge::seal(request));
  if (send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(bytes.size())) {
    fail("send");
  }
  std::string got;
  for (;;) {
    char buffer[1024];
    const ssize_t count = recv(socket.get(), buffer, sizeof buffer, 0);
    if (count < 0) fail("receive");
    if (count == 0) throw Error("it serves another job, or is not of this user");
    // An attacker might go on for hours, byte by byte.
    if (std::chrono::steady_clock::now() >= until) throw Error("no answer");
    got.append(buffer, static_cast<size_t>(count));
    const auto credential = unframed(got);
    if (!credential) continue;
    // Anyone may say so: then there is an error, and no connection without a secret.
    if (*credential == kNone) throw NoSecret();
    const std::string answer = munge::open(*credential);
    if (!answer.starts_with(request)) throw Error("an answer to another request");
    // This user has sealed the request, too: an attacker may send it back.
    if (answer == request) throw Error("an answer without a secret");
    return answer.substr(request.size());
  }
}

}  // namespace

SecretServer::SecretServer(uint16_t port, std::string job, std::string secret)
    : job_(std::move(job)), secret_(std::move(secret)), stop_(eventfd(0, EFD_CLOEXEC)) {
  listen(port);
}

SecretServer::SecretServer(uint16_t port, None) : stop_(eventfd(0, EFD_CLOEXEC)) { listen(port); }

void SecretServer::listen(uint16_t port) {
  // The first takes both kinds of addresses, where the system does not keep them apart.
  int error = EADDRNOTAVAIL;
  for (const char* every : {"::", "0.0.0.0"}) {
    for (const Address& address : resolve(every, port, AI_NUMERICHOST).addresses) {
      if (auto socket = listen_at(address, SOCK_NONBLOCK)) {
        // The kernel keeps those that have sent nothing. Ranks connect before they have a
        // credential, and those of a large job would be closed for each other: of 2,000 clients at
        // once all had the secret after 0.4 s, and 768 after 2.7 s without this.
        const int seconds = kPatience.count();
        setsockopt(socket->get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds);
        listening_.push_back(std::move(*socket));
      } else if (listening_.empty()) {
        error = errno;
      }
    }
  }
  if (listening_.empty() || !stop_) {
    throw Error(fmt::format("port {}, where the job's secret is handed out: {}", port,
                            std::strerror(error)));
  }
  thread_ = thread_without_signals([this] { serve(); });
}

SecretServer::~SecretServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

void SecretServer::serve() {
  std::vector<pollfd> waits;
  for (;;) {
    waits = {{stop_.get(), POLLIN, 0}};
    for (const Fd& one : listening_) waits.push_back({one.get(), POLLIN, 0});
    auto until = Clock::time_point::max();
    for (const Client& one : clients_) {
      waits.push_back({one.fd.get(), static_cast<short>(one.out.empty() ? POLLIN : POLLOUT), 0});
      until = std::min(until, one.until);
    }
    int limit = -1;
    if (!clients_.empty()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
      limit = static_cast<int>(std::max<int64_t>(0, left.count()));
    }
    if (poll(waits.data(), waits.size(), limit) < 0 && errno != EINTR) return;
    if (waits[0].revents != 0) return;
    size_t at = 1 + listening_.size();
    const auto now = Clock::now();
    for (auto client = clients_.begin(); client != clients_.end(); ++at) {
      const bool stays = waits[at].revents == 0 ? now < client->until : goes_on(*client);
      client = stays ? std::next(client) : clients_.erase(client);
    }
    for (size_t i = 0; i < listening_.size(); ++i) {
      if (waits[1 + i].revents != 0) accept_all(listening_[i]);
    }
  }
}

void SecretServer::accept_all(const Fd& listening) {
  for (size_t i = 0; i < kMostClients; ++i) {
    Fd fd(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      const bool is_full = has_no_room(errno);
      if (is_full && !clients_.empty()) clients_.pop_front();
      // Else poll() would tell of it again at once.
      if (is_full && clients_.empty()) std::this_thread::sleep_for(kBetween);
      return;
    }
    if (clients_.size() == kMostClients) clients_.pop_front();
    clients_.push_back({.fd = std::move(fd), .until = Clock::now() + kPatience});
  }
}

// False when the connection is to be closed.
bool SecretServer::goes_on(Client& client) {
  if (!client.out.empty()) {
    const ssize_t sent = send(client.fd.get(), client.out.data(), client.out.size(), MSG_NOSIGNAL);
    if (sent < 0) return is_temporary(errno);
    client.out.erase(0, static_cast<size_t>(sent));
    return !client.out.empty();
  }
  char buffer[1024];
  const ssize_t count = recv(client.fd.get(), buffer, sizeof buffer, 0);
  if (count <= 0) return count < 0 && is_temporary(errno);
  client.in.append(buffer, static_cast<size_t>(count));
  try {
    const auto credential = unframed(client.in);
    if (!credential) return true;
    client.out = answer(*credential);
  } catch (const Error&) {
    return false;
  }
  return goes_on(client);
}

std::string SecretServer::answer(const std::string& credential) const {
  if (secret_.empty()) return framed(std::string(kNone));
  const std::string request = munge::open(credential);
  const std::string begin = request_of(job_, "");  // and a nonce before the last line feed
  if (!request.starts_with(begin.substr(0, begin.size() - 1)) || !request.ends_with('\n')) {
    throw Error("a request for another job");
  }
  return framed(munge::seal(request + secret_));
}

std::string ask_for_secret(const std::string& host, uint16_t port, std::string_view job,
                           std::chrono::milliseconds timeout) {
  const auto until = std::chrono::steady_clock::now() + timeout;
  for (std::string why;;) {
    const auto found = resolve(host, port).addresses;
    if (found.empty()) why = "the name is not known";
    for (const Address& one : found) {
      try {
        return asked_once(one, job);
      } catch (const NoSecret&) {
        throw CommError(
            fmt::format("no secret of the job from {}: that host has no MUNGE, and "
                        "this one has",
                        Endpoint{host, port}.text()));
      } catch (const Error& error) {
        why = error.what();
      }
    }
    if (std::chrono::steady_clock::now() >= until) {
      throw CommError(fmt::format("no secret of the job from {} after {:g} s: {}",
                                  Endpoint{host, port}.text(),
                                  std::chrono::duration<double>(timeout).count(), why));
    }
    std::this_thread::sleep_for(kBetween);
  }
}

}  // namespace lockstep

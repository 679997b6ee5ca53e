#include "train/report/exporters/metrics_server.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "core/network/tcp_options.h"
#include "core/process/thread.h"
#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

constexpr std::string_view kPlain = "text/plain; version=0.0.4; charset=utf-8";
constexpr std::string_view kOpenMetrics =
    "application/openmetrics-text; version=1.0.0; charset=utf-8";
constexpr std::chrono::milliseconds kPause{200};

std::shared_ptr<const std::string> shared(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}

Fd listening_at(const Endpoint& endpoint) {
  const Resolved resolved = resolve(endpoint.host, endpoint.port);
  int error = EADDRNOTAVAIL;
  for (const Address& address : resolved.addresses) {
    if (auto socket = listen_at(address, SOCK_NONBLOCK)) return std::move(*socket);
    error = errno;
  }
  const char* const why =
      resolved.addresses.empty() ? "that name is not known" : std::strerror(error);
  const std::string text = fmt::format(
      "[metrics] prometheus_address {}: {}; give an address of rank 0's host and a port that is "
      "free (0 takes one)",
      endpoint.text(), why);
  if (resolved.addresses.empty() || error == EADDRNOTAVAIL) throw ConfigError(text);
  throw Error(text);
}

}  // namespace

MetricsServer::MetricsServer(const std::string& address)
    : endpoint_(Endpoint::parse("prometheus_address", address, kPort)),
      listening_(listening_at(endpoint_)),
      stop_(eventfd(0, EFD_CLOEXEC)),
      text_(shared("# EOF\n")) {
  if (!stop_) throw Error("[metrics] no descriptor for the Prometheus endpoint");
  endpoint_.port = local_address(listening_.get()).port();
  thread_ = thread_without_signals([this] { serve(); });
}

MetricsServer::~MetricsServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

void MetricsServer::publish(std::string text) {
  auto now = shared(std::move(text));
  const std::lock_guard lock(mutex_);
  text_.swap(now);
}

std::string MetricsServer::url() const { return "http://" + endpoint_.text() + "/metrics"; }

void MetricsServer::serve() {
  std::vector<pollfd> waits;
  for (;;) {
    const auto now = Clock::now();
    clients_.remove_if([&](const Client& one) { return one.is_gone || one.until <= now; });
    auto next = now + std::chrono::hours(1);
    const bool accepts = now >= accepts_from_;
    if (!accepts) next = accepts_from_;
    waits = {{stop_.get(), POLLIN, 0},
             {listening_.get(), static_cast<short>(accepts ? POLLIN : 0), 0}};
    for (const Client& one : clients_) {
      const bool sends = !one.head.empty() && !one.is_closing;
      waits.push_back({one.fd.get(), static_cast<short>(sends ? POLLOUT : POLLIN), 0});
      next = std::min(next, one.until);
    }
    const auto limit = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
    if (poll(waits.data(), waits.size(), static_cast<int>(limit)) < 0 && errno != EINTR) return;
    if (waits[0].revents != 0) return;
    auto client = clients_.begin();
    for (size_t i = 2; i < waits.size(); ++i, ++client) {
      if (waits[i].revents == 0) continue;
      if ((waits[i].events & POLLOUT) != 0) {
        send_to(*client);
      } else {
        read_from(*client);
      }
    }
    if (waits[1].revents != 0) accept_all();
  }
}

void MetricsServer::accept_all() {
  // Those who are there already are served between two of many who come.
  for (size_t i = 0; i < kClients; ++i) {
    Fd fd(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (has_no_room(errno)) accepts_from_ = Clock::now() + kPause;
      if (errno != ECONNABORTED && errno != EINTR) return;
      continue;
    }
    if (clients_.size() == kClients) clients_.pop_front();
    clients_.push_back({.fd = std::move(fd), .until = Clock::now() + kPatience});
  }
}

void MetricsServer::read_from(Client& client) {
  char bytes[2048];
  const ssize_t count = recv(client.fd.get(), bytes, sizeof bytes, 0);
  if (count <= 0) {
    client.is_gone = count == 0 || (errno != EAGAIN && errno != EINTR);
    return;
  }
  if (client.is_closing) return;
  client.in.append(bytes, static_cast<size_t>(count));
  if (client.in.find("\r\n\r\n") != std::string::npos) {
    answer(client);
  } else if (client.in.size() > kRequest) {
    reply(client, "431 Request Header Fields Too Large", kPlain, shared("too long\n"));
  }
}

void MetricsServer::answer(Client& client) {
  const std::string_view line = std::string_view(client.in).substr(0, client.in.find("\r\n"));
  const size_t first = line.find(' '), second = line.find(' ', first + 1);
  if (first == std::string_view::npos || second == std::string_view::npos ||
      !line.substr(second).starts_with(" HTTP/1.")) {
    return reply(client, "400 Bad Request", kPlain, shared("this is not a request of HTTP/1.1\n"));
  }
  const std::string_view method = line.substr(0, first);
  const std::string_view path = line.substr(first + 1, second - first - 1);
  if (method != "GET" && method != "HEAD") {
    return reply(client, "405 Method Not Allowed\r\nAllow: GET, HEAD", kPlain,
                 shared("GET and HEAD are answered\n"));
  }
  if (path.substr(0, path.find('?')) != "/metrics") {
    return reply(client, "404 Not Found", kPlain, shared("the figures are at /metrics\n"));
  }
  const bool is_open = client.in.find("application/openmetrics-text") != std::string::npos;
  const std::lock_guard lock(mutex_);
  reply(client, "200 OK", is_open ? kOpenMetrics : kPlain, text_);
}

void MetricsServer::reply(Client& client, std::string_view status, std::string_view type,
                          std::shared_ptr<const std::string> body) const {
  client.head = fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", status,
      type, body->size());
  if (!client.in.starts_with("HEAD ")) client.body = std::move(body);
  send_to(client);
}

void MetricsServer::send_to(Client& client) const {
  const size_t all = client.head.size() + (client.body ? client.body->size() : 0);
  while (client.sent < all) {
    const bool is_head = client.sent < client.head.size();
    const std::string& part = is_head ? client.head : *client.body;
    const size_t from = is_head ? client.sent : client.sent - client.head.size();
    const ssize_t count =
        send(client.fd.get(), part.data() + from, part.size() - from, MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      client.is_gone = errno != EAGAIN;
      return;
    }
    client.sent += static_cast<size_t>(count);
  }
  // Closed at once it would lose the answer where the client still has something to say.
  client.is_closing = true;
  shutdown(client.fd.get(), SHUT_WR);
}

}  // namespace lockstep::train

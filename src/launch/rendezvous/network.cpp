#include "launch/rendezvous/network.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/tcp_options.h"

namespace lockstep::launch {
namespace {

using namespace std::chrono_literals;

// Who has not proved anything costs memory and a descriptor: beyond that many the oldest goes.
constexpr long kMostStrangers = 256;
// A peer that takes nothing is not worth more memory.
constexpr size_t kMostOutput = 16 << 20;
constexpr auto kClosing = 2s;

}  // namespace

Network::Network(Fd socket, const Keys& keys, Clock::duration patience, Listener& listener)
    : socket_(std::move(socket)), keys_(keys), patience_(patience), listener_(listener) {}

Network::Connection* Network::find(ConnectionId link) {
  for (const auto& connection : connections_) {
    if (connection->link == link && !connection->over && !connection->closing) {
      return connection.get();
    }
  }
  return nullptr;
}

void Network::dial(ConnectionId link, const std::string& address) {
  const Endpoint endpoint = Endpoint::parse("address", address, 0);
  auto connection = std::make_unique<Connection>(
      Connection{.link = link,
                 .peer = address,
                 .channel = SecureChannel(SecureChannel::Side::Caller, keys_),
                 .connecting = true,
                 .until = Clock::now() + patience_});
  const auto found = resolve(endpoint.host, endpoint.port).addresses;
  if (!found.empty()) {
    connection->socket = Fd(
        ::socket(found.front().storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (connection->socket) settle_connection(connection->socket.get());
  }
  const bool begun =
      connection->socket &&
      (connect(connection->socket.get(), found.front().generic(), found.front().length) == 0 ||
       errno == EINPROGRESS);
  // Told in pump(), not from inside the caller's own call.
  if (!begun) connection->until = Clock::now();
  connections_.push_back(std::move(connection));
}

void Network::send(ConnectionId link, const MessagePtr& message) {
  Connection* connection = find(link);
  if (connection == nullptr || !connection->channel.is_open()) return;
  if (encoded_ != message) {
    bytes_ = encode(*message);
    encoded_ = message;
  }
  connection->channel.send(bytes_);
  flush(*connection);
}

void Network::hang_up(ConnectionId link) {
  Connection* connection = find(link);
  if (connection == nullptr) return;
  connection->link.reset();
  connection->closing = true;
  connection->until = Clock::now() + kClosing;
  flush(*connection);
}

void Network::await(std::vector<pollfd>& events) const {
  events.push_back({socket_.get(), POLLIN, 0});
  for (const auto& connection : connections_) {
    if (!connection->socket) continue;
    short wanted = connection->closing ? 0 : POLLIN;
    if (connection->connecting || !connection->output.empty()) wanted |= POLLOUT;
    events.push_back({connection->socket.get(), wanted, 0});
  }
}

std::optional<Network::Clock::time_point> Network::deadline() const {
  std::optional<Clock::time_point> next;
  if (unsaid_ > 0) next = last_said_ + 1s;
  for (const auto& connection : connections_) {
    const bool limited = connection->closing || !connection->channel.is_open();
    if (limited && (!next || connection->until < *next)) next = connection->until;
  }
  return next;
}

void Network::pump() {
  say_what_is_due();
  accept_all();
  // The listener may dial, which makes the list longer.
  for (size_t i = 0; i < connections_.size(); ++i) {
    Connection& connection = *connections_[i];
    if (!connection.over) pump(connection);
  }
  std::erase_if(connections_, [](const auto& connection) { return connection->over; });
}

void Network::pump(Connection& connection) {
  if (connection.connecting) {
    pollfd event{connection.socket.get(), POLLOUT, 0};
    if (connection.socket && poll(&event, 1, 0) == 1) {
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) return close(connection, error == ECONNREFUSED);
      connection.connecting = false;
    }
  }
  if (!connection.connecting) {
    flush(connection);
    if (!connection.over) read(connection);
  }
  const bool limited = connection.closing || !connection.channel.is_open();
  if (connection.over || !limited || Clock::now() < connection.until) return;
  if (!connection.link && !connection.closing) {
    say(fmt::format("{} connected and did not prove that it belongs to this job", connection.peer));
  }
  close(connection);
}

void Network::accept_all() {
  for (;;) {
    Address from;
    from.length = sizeof from.storage;
    Fd socket(accept4(socket_.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.length,
                      SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && errno == ECONNABORTED) continue;
    const bool full = !socket && (errno == EMFILE || errno == ENFILE);
    const auto is_stranger = [](const auto& one) {
      return !one->link && !one->over && !one->closing;
    };
    if (full ||
        std::count_if(connections_.begin(), connections_.end(), is_stranger) >= kMostStrangers) {
      const auto oldest = std::find_if(connections_.begin(), connections_.end(), is_stranger);
      if (oldest != connections_.end()) {
        say(fmt::format("{} had to make room for other connections", (*oldest)->peer));
        close(**oldest);
      }
    }
    if (!socket) return;
    settle_connection(socket.get());
    connections_.push_back(std::make_unique<Connection>(
        Connection{.socket = std::move(socket),
                   .peer = Endpoint{from.host(), from.port()}.text(),
                   .channel = SecureChannel(SecureChannel::Side::Called, keys_),
                   .until = Clock::now() + patience_}));
  }
}

void Network::read(Connection& connection) {
  std::array<char, 1 << 16> buffer;
  while (!connection.over && !connection.closing) {
    const ssize_t got = recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      if (connection.link && !connection.channel.is_open()) {
        listener_.on_disagreement(fmt::format(
            "{} hung up in the middle of the handshake: have both hosts the same token, --rdzv-id "
            "and --tls (or --rdzv-conf tls)?",
            connection.peer));
      }
      return close(connection);
    }
    const bool was_open = connection.channel.is_open();
    std::string error;
    try {
      connection.channel.feed({buffer.data(), static_cast<size_t>(got)});
    } catch (const ProtocolError& failure) {
      error = failure.what();
    }
    // What is left to say helps the other side to tell what is wrong.
    flush(connection);
    if (!was_open && connection.channel.is_open()) {
      if (connection.link) {
        listener_.on_connect(*connection.link);
      } else {
        connection.link = listener_.on_accept();
      }
    }
    deliver(connection);
    if (!error.empty() && !connection.over) {
      const std::string text = fmt::format("{}: {}", connection.peer, error);
      if (connection.link && !was_open) {
        listener_.on_disagreement(text);
      } else {
        say(text);
      }
      return close(connection);
    }
  }
}

void Network::deliver(Connection& connection) {
  for (const MessagePtr& message : connection.channel.take_messages()) {
    if (!connection.link) return;  // hung up meanwhile
    listener_.on_message(*connection.link, message);
  }
}

void Network::flush(Connection& connection) {
  if (connection.over || connection.connecting) return;
  connection.output += connection.channel.take_output();
  while (!connection.output.empty()) {
    const ssize_t sent = ::send(connection.socket.get(), connection.output.data(),
                                connection.output.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) {
      connection.output.clear();
      if (connection.closing) connection.over = true;
      return;  // read() will see its end
    }
    connection.output.erase(0, static_cast<size_t>(sent));
  }
  if (connection.output.size() > kMostOutput) {
    connection.output.clear();
    shutdown(connection.socket.get(), SHUT_RDWR);
  }
  if (connection.closing && connection.output.empty()) {
    connection.over = true;
    connection.socket.reset();
  }
}

void Network::close(Connection& connection, bool refused) {
  if (connection.over) return;
  connection.over = true;
  connection.socket.reset();
  if (connection.link) listener_.on_close(*connection.link, refused);
}

// However many there are, a line a second.
void Network::say(const std::string& text) {
  unsaid_ += 1;
  last_text_ = text;
  say_what_is_due();
}

void Network::say_what_is_due() {
  const auto now = Clock::now();
  if (unsaid_ == 0 || now < last_said_ + 1s) return;
  last_said_ = now;
  const int others = std::exchange(unsaid_, 0) - 1;
  listener_.on_stranger(others > 0 ? fmt::format("{} (and {} before it)", last_text_, others)
                                   : last_text_);
}

void Network::finish(Clock::duration limit) {
  const auto until = Clock::now() + limit;
  for (;;) {
    std::vector<pollfd> events;
    for (const auto& connection : connections_) {
      flush(*connection);
      if (!connection->over && !connection->output.empty()) {
        events.push_back({connection->socket.get(), POLLOUT, 0});
      }
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (events.empty() || left <= 0) break;
    poll(events.data(), events.size(), static_cast<int>(left));
  }
  connections_.clear();
}

}  // namespace lockstep::launch

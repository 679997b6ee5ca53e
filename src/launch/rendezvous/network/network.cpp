#include "launch/rendezvous/network/network.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/network/tcp_options.h"

namespace lockstep::launch {
namespace {

using namespace std::chrono_literals;

// Connections that have not authenticated cost memory and a descriptor: beyond that many the oldest
// is closed.
constexpr size_t kMostUnproved = 256;
// The most that is buffered for a peer that reads nothing.
constexpr size_t kMostOutput = 16 << 20;
constexpr auto kClosing = 2s;
// While no descriptor is left for a new connection.
constexpr auto kPause = 100ms;
constexpr auto kRepeated = 30s;

}  // namespace

Network::Network(Fd socket, const Keys& keys, Clock::duration patience, Handler& handler)
    : socket_(std::move(socket)),
      keys_(keys),
      patience_(patience),
      handler_(handler),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw Error(fmt::format("[run] epoll_create1: {}", std::strerror(errno)));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  if (socket_) epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket_.get(), &event);
}

Network::Connection* Network::find(ConnectionId link) {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second;
}

Network::Connection& Network::add(SecureChannel::Side side, std::string peer) {
  const uint64_t number = ++last_number_;
  return connections_
      .emplace(number, Connection{.number = number,
                                  .peer = std::move(peer),
                                  .channel = SecureChannel(side, keys_),
                                  .until = Clock::now() + patience_})
      .first->second;
}

void Network::watch(Connection& connection) {
  uint32_t wanted = 0;
  if (!connection.closing) wanted |= EPOLLIN;
  if (connection.connecting || !connection.output.empty()) wanted |= EPOLLOUT;
  if (wanted == connection.events) return;
  epoll_event event{.events = wanted, .data = {.u64 = connection.number}};
  epoll_ctl(epoll_.get(), connection.events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD,
            connection.socket.get(), &event);
  connection.events = wanted;
}

void Network::dial(ConnectionId link, const std::string& name, const std::vector<Address>& found) {
  const auto known = reached_;
  connect_to(link, name, found.empty() && known ? &*known : choose(found));
}

// The first that has not been tried, or the one that got through last. Null where there is none.
const Address* Network::choose(const std::vector<Address>& found) {
  if (found.empty()) return nullptr;
  const auto is_new = [this](const Address& one) { return !tried_.contains(one.host()); };
  if (std::none_of(found.begin(), found.end(), is_new)) tried_.clear();
  auto chosen = std::find_if(found.begin(), found.end(), [&](const Address& one) {
    return reached_ && one.host() == reached_->host() && is_new(one);
  });
  if (chosen == found.end()) chosen = std::find_if(found.begin(), found.end(), is_new);
  tried_.insert(chosen->host());
  return &*chosen;
}

void Network::connect_to(ConnectionId link, const std::string& name, const Address* address) {
  Connection& connection = add(SecureChannel::Side::Caller, name);
  connection.link = link;
  connection.connecting = true;
  links_[link] = &connection;
  if (address != nullptr) {
    connection.to = *address;
    misses_.try_emplace(address->host(), "no answer");
    connection.socket =
        Fd(::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (connection.socket) settle_connection(connection.socket.get());
  }
  const bool begun = connection.socket &&
                     (connect(connection.socket.get(), address->generic(), address->length) == 0 ||
                      errno == EINPROGRESS);
  if (begun) {
    watch(connection);
  } else {
    if (address != nullptr) misses_[address->host()] = std::strerror(errno);
    connection.until = Clock::now();  // reported in pump(), not from inside the caller's own call
  }
}

std::string Network::misses() const {
  std::vector<std::string> all;
  for (const auto& [address, why] : misses_) all.push_back(address + ": " + why);
  return fmt::format("{}", fmt::join(all, ", "));
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
  links_.erase(link);
  connection->link.reset();
  connection->closing = true;
  connection->until = Clock::now() + kClosing;
  flush(*connection);
}

void Network::await(std::vector<pollfd>& events) const {
  events.push_back({epoll_.get(), POLLIN, 0});
}

std::optional<Network::Clock::time_point> Network::deadline() const {
  std::optional<Clock::time_point> next;
  if (unsaid_ > 0) next = says_at();
  if (listens_again_ && (!next || *listens_again_ < *next)) next = listens_again_;
  for (const auto& [number, connection] : connections_) {
    const bool limited = connection.closing || !connection.channel.is_open();
    if (limited && (!next || connection.until < *next)) next = connection.until;
  }
  return next;
}

void Network::pump() {
  say_what_is_due();
  listen_again_when_due();
  std::array<epoll_event, 256> events;
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t number = events[static_cast<size_t>(i)].data.u64;
    if (number == 0) {
      accept_all();
    } else if (const auto found = connections_.find(number);
               found != connections_.end() && !found->second.over) {
      pump(found->second);
    }
  }
  drop_the_late();
  std::erase_if(connections_, [](const auto& one) { return one.second.over; });
}

void Network::pump(Connection& connection) {
  if (connection.connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(connection.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      misses_[connection.to.host()] = std::strerror(error);
      const bool is_there = !reached_ || reached_->host() == connection.to.host();
      return close(connection, error == ECONNREFUSED && is_there);
    }
    connection.connecting = false;
  }
  flush(connection);
  if (!connection.over) read(connection);
}

void Network::drop_the_late() {
  const auto now = Clock::now();
  // The handler may dial, which makes the list longer.
  for (auto& [number, connection] : connections_) {
    const bool limited = connection.closing || !connection.channel.is_open();
    if (connection.over || !limited || now < connection.until) continue;
    if (!connection.link && !connection.closing) {
      say(connection, " connected and did not prove that it belongs to this job");
    }
    close(connection);
  }
}

void Network::accept_all() {
  for (;;) {
    Address from;
    from.length = sizeof from.storage;
    Fd socket(accept4(socket_.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.length,
                      SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && errno == ECONNABORTED) continue;
    const bool full = !socket && has_no_room(errno);
    if (!unproved_.empty() && (full || unproved_.size() >= kMostUnproved)) {
      Connection& oldest = connections_.at(*unproved_.begin());
      say(oldest, " had to make room for other connections");
      close(oldest);
    } else if (full) {
      epoll_event nothing{.events = 0, .data = {.u64 = 0}};
      epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket_.get(), &nothing);
      listens_again_ = Clock::now() + kPause;
    }
    if (!socket) return;
    settle_connection(socket.get());
    Connection& connection =
        add(SecureChannel::Side::Called, Endpoint{from.host(), from.port()}.text());
    connection.socket = std::move(socket);
    unproved_.insert(connection.number);
    watch(connection);
  }
}

void Network::listen_again_when_due() {
  if (!listens_again_ || Clock::now() < *listens_again_) return;
  listens_again_.reset();
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, socket_.get(), &event);
}

void Network::read(Connection& connection) {
  std::array<char, 1 << 14> buffer;  // the stack may be small (ulimit -s)
  while (!connection.over && !connection.closing) {
    const ssize_t got = recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      if (connection.link && !connection.channel.is_open()) {
        handler_.on_disagreement(fmt::format(
            "{} closed the connection during the handshake: check that both hosts have the same "
            "token, --rdzv-id and --tls (or --rdzv-conf tls), and that no other program has the "
            "port",
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
    // The remaining output lets the other side report what is wrong.
    flush(connection);
    if (!was_open && connection.channel.is_open()) {
      if (connection.link) {
        tried_.clear();
        misses_.clear();
        reached_ = connection.to;
        handler_.on_connect(*connection.link);
      } else {
        unproved_.erase(connection.number);
        connection.link = handler_.on_accept();
        links_[*connection.link] = &connection;
      }
    }
    deliver(connection);
    if (!error.empty() && !connection.over) {
      if (connection.link && !was_open) {
        handler_.on_disagreement(fmt::format("{}: {}", connection.peer, error));
      } else {
        say(connection, ": " + error);
      }
      return close(connection);
    }
  }
}

void Network::deliver(Connection& connection) {
  for (const MessagePtr& message : connection.channel.take_messages()) {
    if (!connection.link) return;  // the connection was closed meanwhile
    handler_.on_message(*connection.link, message);
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
    return;
  }
  watch(connection);
}

void Network::close(Connection& connection, bool refused) {
  if (connection.over) return;
  connection.over = true;
  connection.socket.reset();
  unproved_.erase(connection.number);
  if (!connection.link) return;
  links_.erase(*connection.link);
  handler_.on_close(*connection.link, refused);
}

Network::Clock::time_point Network::says_at() const {
  return last_said_ + (last_cause_ == said_cause_ ? kRepeated : 1s);
}

// At most one line a second, and one in kRepeated about what a host does again and again.
void Network::say(const Connection& connection, const std::string& what) {
  unsaid_ += 1;
  last_text_ = connection.peer + what;
  std::string cause = connection.peer.substr(0, connection.peer.rfind(':')) + what;
  last_cause_ = std::move(cause);
  say_what_is_due();
}

void Network::say_what_is_due() {
  const auto now = Clock::now();
  if (unsaid_ == 0 || now < says_at()) return;
  last_said_ = now;
  said_cause_ = last_cause_;
  const int others = std::exchange(unsaid_, 0) - 1;
  handler_.on_refused_connection(
      others > 0 ? fmt::format("{} (and {} before it)", last_text_, others) : last_text_);
}

void Network::finish(Clock::duration limit) {
  socket_.reset();
  const auto until = Clock::now() + limit;
  for (;;) {
    std::vector<pollfd> events;
    for (auto& [number, connection] : connections_) {
      flush(connection);
      if (!connection.over && !connection.output.empty()) {
        events.push_back({connection.socket.get(), POLLOUT, 0});
      }
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (events.empty() || left <= 0) break;
    poll(events.data(), events.size(), static_cast<int>(left));
  }
  links_.clear();
  connections_.clear();
}

}  // namespace lockstep::launch

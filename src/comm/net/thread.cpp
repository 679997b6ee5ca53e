// The net's thread: connects, accepts connections, reads and writes.
#include "core/process/thread.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "comm/net/net.h"
#include "core/network/address.h"
#include "core/network/tcp_options.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;

// After the ranks of the world, which count from 0.
constexpr uint64_t kStop = uint64_t{1} << 40, kListening = kStop + 1, kAccepted = uint64_t{1} << 41;
// How often to connect again to a rank that closes the connection in the handshake, because too
// many unknown connections wait there, and after what pause.
constexpr int kMostTries = 100;
constexpr milliseconds kPause{50};
constexpr milliseconds kLinger{2000};
// After a failure, when the launcher is about to end this process, which has yet to report why; a
// lost host receives nothing more anyway.
constexpr milliseconds kLingerAfterFailure{100};

size_t most_unidentified() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 8;
  return static_cast<size_t>(std::clamp<rlim_t>(limit.rlim_cur / 8, 4, 64));
}

Fd listening_on(const std::string& address, std::string& own) {
  const Resolved found = resolve(address, 0, AI_NUMERICHOST);
  if (found.addresses.empty()) {
    throw CommError(fmt::format("[tcp] start: {} is not an address", address));
  }
  auto fd = listen_at(found.addresses[0], SOCK_NONBLOCK);
  if (!fd) {
    if (errno == EADDRINUSE) {
      throw CommError(fmt::format(
          "[tcp] start: cannot listen at {}: no port is free (sysctl net.ipv4.ip_local_port_range)",
          address));
    }
    throw CommError(
        fmt::format("[tcp] start: cannot listen at {}: {}; set GLOO_SOCKET_IFNAME to the "
                    "interface by which the hosts reach each other",
                    address, std::strerror(errno)));
  }
  own = fmt::format("{} {}", address, local_address(fd->get()).port());
  return std::move(*fd);
}

}  // namespace

Net::Net(int rank, const std::string& address, const Digest& key, NetOptions options)
    : rank_(rank),
      key_(key),
      options_(std::move(options)),
      listening_(listening_on(address, own_address_)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      events_(epoll_create1(EPOLL_CLOEXEC)),
      most_accepted_(most_unidentified()) {
  if (!watch(stop_.get(), EPOLLIN, kStop)) {
    throw CommError(fmt::format("[tcp] start: no descriptor: {}", std::strerror(errno)));
  }
}

void Net::meet(std::vector<std::string> addresses) {
  addresses_ = std::move(addresses);
  for (size_t rank = 0; rank < addresses_.size(); ++rank) {
    peers_.push_back(std::make_unique<Peer>(static_cast<int>(rank), *this));
  }
  watch(listening_.get(), EPOLLIN, kListening);
  try {
    thread_ = thread_without_signals([this] { serve(); });
  } catch (const std::exception& error) {
    throw CommError(fmt::format("[tcp] start: no thread: {}", error.what()));
  }
}

Net::~Net() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

bool Net::watch(int fd, uint32_t events, uint64_t who) {
  epoll_event event{.events = events, .data = {.u64 = who}};
  return epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) == 0 ||
         (errno == EEXIST && epoll_ctl(events_.get(), EPOLL_CTL_MOD, fd, &event) == 0);
}

std::optional<Net::Clock::time_point> Net::next_timer() const {
  auto next = listen_again_;
  for (const auto& peer : peers_) {
    if (peer->timer && (!next || *peer->timer < *next)) next = peer->timer;
  }
  return next;
}

void Net::serve() {
  for (;;) {
    int limit = -1;
    {
      const std::lock_guard lock(mutex_);
      if (const auto next = next_timer()) {
        limit = static_cast<int>(
            std::max<int64_t>(0, std::chrono::ceil<milliseconds>(*next - Clock::now()).count()));
      }
    }
    epoll_event events[64];
    const int count = epoll_wait(events_.get(), events, 64, limit);
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) handle(events[i].data.u64, events[i].events);
    run_timers();
    flush_all();
    if (stopping_) return linger();
  }
}

void Net::handle(uint64_t who, uint32_t events) {
  if (who == kStop) {
    stopping_ = (events & EPOLLIN) != 0;
    if (!stopping_) watch(stop_.get(), EPOLLIN, kStop);
  } else if (who == kListening) {
    accept_all();
  } else if (who >= kAccepted) {
    step_accepted(who - kAccepted);
  } else {
    step_peer(static_cast<int>(who), events);
  }
}

void Net::run_timers() {
  const auto now = Clock::now();
  if (listen_again_ && *listen_again_ <= now) {
    listen_again_.reset();
    if (listening_) watch(listening_.get(), EPOLLIN, kListening);
  }
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = *peers_[rank];
    if (!peer.timer || *peer.timer > now) continue;
    peer.timer.reset();
    if (peer.state != State::Idle) continue;
    if (!peer.gone.empty()) {
      lose(static_cast<int>(rank), std::string(peer.gone));
    } else {
      connect(static_cast<int>(rank));
    }
  }
}

void Net::accept_all() {
  while (listening_) {
    Fd fd(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (is_temporary(errno) || errno == ECONNABORTED) return;
      if (!accepted_.empty()) {
        accepted_.pop_front();  // the oldest unknown connection makes room
        continue;
      }
      watch(listening_.get(), 0, kListening);
      listen_again_ = Clock::now() + milliseconds(100);
      return;
    }
    settle_connection(fd.get(), options_.deadline);
    const uint64_t number = next_accepted_++;
    if (!watch(fd.get(), EPOLLIN, kAccepted + number)) continue;
    accepted_.push_back({.fd = std::move(fd),
                         .handshake = NetHandshake::called(key_, rank_, options_.payload),
                         .number = number});
    if (accepted_.size() > most_accepted_) {
      // Its handshake may just have arrived.
      step_accepted(accepted_.front().number);
      if (accepted_.size() > most_accepted_) accepted_.pop_front();
    }
  }
}

void Net::step_accepted(uint64_t number) {
  const auto found = std::find_if(accepted_.begin(), accepted_.end(),
                                  [&](const auto& one) { return one.number == number; });
  if (found == accepted_.end()) return;
  try {
    if (!step(*found)) return;
  } catch (const std::exception&) {
    accepted_.erase(found);  // no rank of this job
    return;
  }
  Shaking shaking = std::move(*found);
  const int peer = shaking.handshake.peer();
  accepted_.erase(found);
  if (peer <= rank_ || peer >= static_cast<int>(peers_.size())) return;
  if (peers_[static_cast<size_t>(peer)]->state == State::Idle) open(peer, std::move(shaking));
}

// True when both sides know each other and all of it is sent. Throws when they never will.
bool Net::step(Shaking& shaking) {
  while (!shaking.handshake.is_over()) {
    char buffer[4096];
    const size_t wanted = std::min(sizeof buffer, shaking.handshake.wants());
    const ssize_t got = recv(shaking.fd.get(), buffer, wanted, 0);
    if (got < 0 && is_temporary(errno)) break;
    if (got <= 0) throw Error(got == 0 ? "it closed the connection" : std::strerror(errno));
    shaking.handshake.feed({buffer, static_cast<size_t>(got)});
    shaking.out += shaking.handshake.take_output();
  }
  while (!shaking.out.empty()) {
    const ssize_t sent =
        send(shaking.fd.get(), shaking.out.data(), shaking.out.size(), MSG_NOSIGNAL);
    if (sent < 0 && is_temporary(errno)) return false;
    if (sent < 0) throw Error(std::strerror(errno));
    shaking.out.erase(0, static_cast<size_t>(sent));
  }
  return shaking.handshake.is_over();
}

void Net::connect(int rank) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  const std::string& text = addresses_[static_cast<size_t>(rank)];
  const size_t space = text.find(' ');
  const auto port = static_cast<uint16_t>(std::atoi(text.c_str() + space + 1));
  const std::string host =
      with_interface_of(own_address_.substr(0, own_address_.find(' ')), text.substr(0, space));
  const Resolved found = resolve(host, port, AI_NUMERICHOST);
  int error = EINVAL;
  if (!found.addresses.empty()) {
    const Address& there = found.addresses[0];
    Fd fd(socket(there.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd) settle_connection(fd.get(), options_.deadline);
    if (!fd || (::connect(fd.get(), there.generic(), there.length) != 0 && errno != EINPROGRESS) ||
        !watch(fd.get(), EPOLLIN | EPOLLOUT, static_cast<uint64_t>(rank))) {
      error = errno;
    } else {
      peer.connecting = std::move(fd);
      peer.state = State::Connecting;
      return;
    }
  }
  // Reported later, since the caller is in the middle of something.
  peer.gone = fmt::format("cannot be reached at {} ({})", text, std::strerror(error));
  peer.timer = Clock::now();
  // Ends the thread's wait, which began before there was a timer: it can be written to at any time.
  watch(stop_.get(), EPOLLIN | EPOLLOUT, kStop);
}

void Net::step_peer(int rank, uint32_t events) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  if (peer.state == State::Open) {
    dirty_.insert(rank);
    if ((events & ~uint32_t{EPOLLOUT}) == 0) return;
    try {
      peer.line.read();
    } catch (const std::exception& error) {
      lose(rank, error.what());
    }
    return;
  }
  if (peer.state == State::Connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(peer.connecting.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    const std::string& address = addresses_[static_cast<size_t>(rank)];
    if (error == ECONNREFUSED) {
      return lose(rank, fmt::format("refuses connections at {}: it has ended, or a firewall closes "
                                    "the port",
                                    address));
    }
    if (error != 0) {
      return lose(rank, fmt::format("cannot be reached at {} ({})", address, std::strerror(error)));
    }
    peer.state = State::Shaking;
    peer.shaking.emplace(Shaking{std::move(peer.connecting),
                                 NetHandshake::caller(key_, rank_, rank, options_.payload)});
    peer.shaking->out = peer.shaking->handshake.take_output();
  }
  if (peer.state != State::Shaking) return;
  try {
    if (step(*peer.shaking)) {
      Shaking shaking = std::move(*peer.shaking);
      peer.shaking.reset();
      open(rank, std::move(shaking));
    } else if (peer.shaking->out.empty()) {
      watch(peer.shaking->fd.get(), EPOLLIN, static_cast<uint64_t>(rank));
    }
  } catch (const TlsError& error) {
    lose(rank, fmt::format("does not know the secret of this job ({})", error.what()));
  } catch (const std::exception& error) {
    peer.shaking.reset();
    if (++peer.tries > kMostTries) {
      return lose(rank, fmt::format("accepted no connection ({})", error.what()));
    }
    peer.state = State::Idle;
    peer.timer = Clock::now() + kPause;
  }
}

void Net::open(int rank, Shaking shaking) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  watch(shaking.fd.get(), EPOLLIN, static_cast<uint64_t>(rank));
  peer.state = State::Open;
  peer.timer.reset();
  peer.gone.clear();
  peer.line.open(std::move(shaking.fd), shaking.handshake.take_channel());
  dirty_.insert(rank);
  listen_no_longer_than_needed();
}

// Once all higher ranks have connected, further connections are not from ranks of this job.
void Net::listen_no_longer_than_needed() {
  const bool all = std::all_of(peers_.begin() + rank_ + 1, peers_.end(), [](const auto& one) {
    return one->state == State::Open || one->state == State::Gone;
  });
  if (!all) return;
  listening_.reset();
  accepted_.clear();
}

void Net::lose(int rank, const std::string& why) {
  Peer& peer = *peers_[static_cast<size_t>(rank)];
  if (peer.state == State::Gone) return;
  peer.gone = why;
  peer.state = State::Gone;
  peer.connecting.reset();
  peer.shaking.reset();
  listen_no_longer_than_needed();
  const auto unsent = peer.line.close();
  for (const auto& [id, one] : boxes_) one->lost(rank, unsent);
  for (size_t other = 0; other < peers_.size(); ++other) {
    if (peers_[other]->state != State::Open) continue;
    line_if_any(static_cast<int>(other))
        .send_urgent({.kind = NetKind::Gone, .key = {.part = static_cast<uint32_t>(rank)}});
  }
}

// No new operation begins. What was handed over is delivered: a connection that is closed with
// something unread would be reset, and what is under way lost.
void Net::linger() {
  auto end = Clock::now() + (has_failed_ ? kLingerAfterFailure : kLinger);
  for (;;) {
    if (options_.is_job_over && options_.is_job_over())
      end = std::min(end, Clock::now() + kLingerAfterFailure);
    bool waits = false;
    for (const auto& peer : peers_) {
      if (peer->state == State::Open && peer->line.lingers()) waits = true;
    }
    if (!waits || Clock::now() >= end) break;
    std::this_thread::sleep_for(milliseconds(1));
  }
  for (const auto& peer : peers_) (void)peer->line.close();
  accepted_.clear();
}

}  // namespace lockstep::comm

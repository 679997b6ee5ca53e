#include "comm/net/net.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "core/divided_up.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

uint32_t NetPort::parts_of(int64_t bytes) {
  return static_cast<uint32_t>(std::max<int64_t>(1, divided_up(bytes, NetFrame::kMostPayload)));
}

namespace {

// Calls `one(part, offset, bytes, then)` for each piece; `then` goes with the last, which is the
// last to come, as pieces keep their order.
template <class One>
void in_pieces(uint32_t part, int64_t bytes, NetPort::Then then, const One& one) {
  int64_t at = 0;
  do {
    const int64_t size = std::min(NetFrame::kMostPayload, bytes - at);
    const bool last = at + size == bytes;
    one(part++, at, size, last ? std::move(then) : NetPort::Then());
    at += size;
  } while (at < bytes);
}

}  // namespace

void NetPort::send(int peer, uint32_t part, const char* data, int64_t bytes, Then then) const {
  in_pieces(part, bytes, std::move(then), [&](uint32_t p, int64_t at, int64_t size, Then next) {
    box_->send(*job_, peer, p, data + at, size, std::move(next));
  });
}

void NetPort::recv(int peer, uint32_t part, char* data, int64_t bytes, Then then) const {
  in_pieces(part, bytes, std::move(then), [&](uint32_t p, int64_t at, int64_t size, Then next) {
    box_->recv(*job_, peer, p, data + at, size, std::move(next));
  });
}

NetGroup::NetGroup(std::shared_ptr<Net> net, uint64_t id, int rank, std::vector<int> members)
    : net_(std::move(net)) {
  const std::lock_guard lock(net_->mutex_);
  box_ = &net_->box(id);
  if (box_->is_joined()) throw CommError("[tcp] two groups of one world have the same name");
  box_->join(rank, std::move(members));
}

NetGroup::~NetGroup() { leave(); }

void NetGroup::leave() noexcept {
  try {
    const std::lock_guard lock(net_->mutex_);
    box_->leave();
    net_->flush_all();
  } catch (const std::exception&) {
    // No memory: the others find out by their deadlines.
  }
}

std::shared_ptr<NetJob> NetGroup::start(const NetCallName& name,
                                        const std::function<void(const NetPort&)>& begin) {
  const std::lock_guard lock(net_->mutex_);
  auto job = box_->open(name);
  if (!job->is_over()) begin(NetPort(*box_, *job));
  box_->begun(*job);
  net_->flush_all();
  return job;
}

void NetGroup::skip(const NetCallName& name, const std::string& text) {
  const std::lock_guard lock(net_->mutex_);
  box_->skip(name, text);
  net_->flush_all();
}

bool NetGroup::wait(const NetJob& job, Net::Clock::time_point until) {
  if (job.is_over()) return true;
  std::unique_lock lock(net_->mutex_);
  return net_->over_.wait_until(lock, until, [&] { return job.is_over(); });
}

void NetGroup::give_up(NetJob& job) noexcept {
  const std::lock_guard lock(net_->mutex_);
  box_->fail(job, {.what = "was given up"});
}

void NetGroup::abort(const std::string& why) noexcept {
  try {
    const std::lock_guard lock(net_->mutex_);
    net_->has_failed_ = true;
    box_->abort(why);
    net_->flush_all();
  } catch (const std::exception&) {
    // No memory: the others find out by their deadlines.
  }
}

NetBox& Net::box(uint64_t id) {
  auto& place = boxes_[id];
  if (!place) place = std::make_unique<NetBox>(id, *this);
  return *place;
}

NetTarget Net::arrived(int peer, const NetFrame& frame) {
  if (frame.kind != NetKind::Gone) return box(frame.group).arrived(peer, frame);
  const auto rank = static_cast<size_t>(frame.key.part);
  if (rank < peers_.size() && static_cast<int>(rank) != rank_ &&
      peers_[rank]->state == State::Idle) {
    // It may have connected before it ended; what it has sent is read first.
    peers_[rank]->gone = fmt::format("has ended, as rank {} of the world says", peer);
    peers_[rank]->timer = Clock::now() + std::chrono::milliseconds(300);
  }
  return {};
}

NetLine& Net::line_to(int peer) {
  dirty_.insert(peer);
  Peer& there = *peers_[static_cast<size_t>(peer)];
  if (there.state == State::Idle && peer < rank_) connect(peer);
  return there.line;
}

NetLine& Net::line_if_any(int peer) {
  dirty_.insert(peer);
  return peers_[static_cast<size_t>(peer)]->line;
}

std::optional<std::string> Net::gone(int peer) const {
  const Peer& there = *peers_[static_cast<size_t>(peer)];
  if (there.state != State::Gone) return std::nullopt;
  return there.gone;
}

void Net::forget(const NetJob* job) {
  for (const auto& peer : peers_) {
    if (peer) peer->line.forget(job);
  }
}

size_t Net::connections() const {
  const std::lock_guard lock(mutex_);
  return accepted_.size() +
         static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), [](const auto& peer) {
           return peer->state != State::Idle && peer->state != State::Gone;
         }));
}

std::string Net::unanswered() const {
  constexpr size_t kMost = 8;
  const std::lock_guard lock(mutex_);
  std::vector<std::string> peers;
  for (size_t rank = 0; rank < peers_.size() && peers.size() < kMost; ++rank) {
    if (peers_[rank]->state != State::Connecting) continue;
    peers.push_back(fmt::format("rank {} gives no answer at {}", rank, addresses_[rank]));
  }
  return fmt::format("{}", fmt::join(peers, ", "));
}

std::string Net::unacknowledged() const {
  constexpr size_t kMost = 8;
  constexpr int kOften = 3;  // a packet may be lost
  const std::lock_guard lock(mutex_);
  std::vector<std::string> peers;
  for (size_t rank = 0; rank < peers_.size() && peers.size() < kMost; ++rank) {
    if (peers_[rank]->state != State::Open) continue;
    tcp_info info{};
    socklen_t length = sizeof info;
    getsockopt(peers_[rank]->line.fd(), IPPROTO_TCP, TCP_INFO, &info, &length);
    if (info.tcpi_retransmits < kOften) continue;
    peers.push_back(fmt::format("rank {} at {}", rank, addresses_[rank]));
  }
  if (peers.empty()) return "";
  return fmt::format(
      "what rank {} has sent to {} does not arrive, however often it is sent again: the host is "
      "cut off, a firewall drops it, or large packets get lost on the way (MTU; 'sysctl -w "
      "net.ipv4.tcp_mtu_probing=1' on each host helps)",
      rank_, fmt::join(peers, ", "));
}

// Sends what can be sent, which may end calls, which may bring more.
void Net::flush_all() {
  while (!dirty_.empty()) {
    const int rank = *dirty_.begin();
    dirty_.erase(dirty_.begin());
    Peer& peer = *peers_[static_cast<size_t>(rank)];
    if (peer.state != State::Open) continue;
    try {
      peer.line.flush();
    } catch (const std::exception& error) {
      lose(rank, fmt::format("has lost its connection ({})", error.what()));
      continue;
    }
    const bool waits = peer.line.has_output();
    if (waits != peer.watches_output) {
      watch(peer.line.fd(), waits ? EPOLLIN | EPOLLOUT : EPOLLIN, static_cast<uint64_t>(rank));
      peer.watches_output = waits;
    }
  }
  if (std::exchange(changed_, false)) over_.notify_all();
}

}  // namespace lockstep::comm

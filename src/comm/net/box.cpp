#include "comm/net/box.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace lockstep::comm {
namespace {

// Eager messages that a peer may have to keep for a call it has not begun.
constexpr int64_t kMostOut = 4 << 20;
constexpr uint32_t kMostCount = 512;

// Calls that moved nothing, with which messages of slower ranks are compared.
constexpr size_t kSkipped = 64;

// In larger groups connected ranks forward it.
constexpr size_t kFew = 64;

constexpr const char* kContradiction = "is not what the others called";

}  // namespace

void NetBox::join(int rank, std::vector<int> members) {
  rank_ = rank;
  members_ = std::move(members);
}

NetKey NetBox::key_of(const NetJob& job, uint32_t part) {
  return {job.name().kind == NetCallName::Kind::All ? 0u : 1u, job.name().number, part};
}

NetBox::CallKey NetBox::call_key(const NetJob& job) const {
  const NetCallName& name = job.name();
  return {name.kind, name.peer < 0 ? -1 : members_[static_cast<size_t>(name.peer)], name.number};
}

// The call here to which a peer's frame belongs.
NetJob* NetBox::call_of(int peer, const NetFrame& frame) const {
  CallKey key{NetCallName::Kind::All, -1, frame.key.number};
  if (frame.key.lane == 1) {
    // What a peer receives is what is sent here.
    const bool sent_here = frame.kind == NetKind::Grant;
    key = {sent_here ? NetCallName::Kind::Send : NetCallName::Kind::Recv, peer, frame.key.number};
  }
  const auto found = open_.find(key);
  return found == open_.end() ? nullptr : found->second.get();
}

NetFrame NetBox::frame_of(NetKind kind, const NetJob& job, const NetKey& key, int64_t bytes) const {
  return {.kind = kind, .group = id_, .key = key, .checksum = job.name().checksum, .bytes = bytes};
}

int NetBox::member(int peer) const {
  return static_cast<int>(std::find(members_.begin(), members_.end(), peer) - members_.begin());
}

// Whether what a peer says is about the same call.
bool NetBox::agrees(const NetFrame& frame, NetJob* job) {
  if (job == nullptr) {
    const auto skipped = std::find_if(skipped_.begin(), skipped_.end(), [&](const Skipped& one) {
      return frame.key.lane == 0 && one.number == frame.key.number;
    });
    if (skipped == skipped_.end() || skipped->checksum == frame.checksum) return true;
    refuse_others_of(skipped->text);
    return false;
  }
  if (job->name().checksum == frame.checksum) return true;
  fail(*job, {.what = kContradiction, .contradicts = true});
  return false;
}

std::shared_ptr<NetJob> NetBox::open(const NetCallName& name) {
  auto job = std::make_shared<NetJob>(name);
  job->pending_ = 1;
  open_[call_key(*job)] = job;
  if (dead_) {
    fail(*job, *dead_);
    return job;
  }
  if (name.peer >= 0) check_heard(*job, members_[static_cast<size_t>(name.peer)]);
  for (const auto& [peer, heard] : peers_) {
    if (name.peer < 0 && !job->is_over()) check_heard(*job, peer);
  }
  return job;
}

void NetBox::skip(const NetCallName& name, const std::string& text) {
  skipped_.push_back({name.number, name.checksum, text});
  if (skipped_.size() > kSkipped) skipped_.pop_front();
  NetJob job(name);
  for (const auto& [peer, heard] : peers_) check_heard(job, peer);
  if (job.is_over()) refuse_others_of(text);
}

void NetBox::refuse_others_of(const std::string& text) {
  if (closed_ || dead_) return;
  const std::string why = fmt::format("its {} {}", text, kContradiction);
  dead_ = NetFailure{.what = fmt::format("failed ({})", why)};
  abort(why);
}

// Whether what that rank has said of this call is about another one.
void NetBox::check_heard(NetJob& job, int peer) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  const NetKey first = key_of(job, 0);
  const auto differs = [&](const auto& map, const auto& checksum_of) {
    const auto next = map.lower_bound(first);
    return next != map.end() && next->first.lane == first.lane &&
           next->first.number == first.number && checksum_of(next->second) != job.name().checksum;
  };
  const auto of_announced = [](const Announced& one) { return one.checksum; };
  const Peer& heard = found->second;
  const bool receives = job.name().kind != NetCallName::Kind::Send;
  const bool sends = job.name().kind != NetCallName::Kind::Recv;
  if ((receives && (differs(heard.early, [](const auto& one) { return one->checksum; }) ||
                    differs(heard.offers, of_announced))) ||
      (sends && differs(heard.grants, of_announced))) {
    fail(job, {.what = kContradiction, .contradicts = true});
  }
}

// Why no more messages of this group come from that rank.
std::optional<std::string> NetBox::silent(int peer) const {
  if (auto why = wires_.gone(peer)) return why;
  const auto found = peers_.find(peer);
  if (found != peers_.end() && found->second.left) return "has left the group";
  return std::nullopt;
}

void NetBox::send(NetJob& job, int peer, uint32_t part, const char* data, int64_t bytes,
                  Then then) {
  if (job.is_over()) return;
  const int to = members_[static_cast<size_t>(peer)];
  if (auto why = silent(to)) return fail(job, {.what = *why, .peer = peer});
  ++job.pending_;
  const NetKey key = key_of(job, part);
  Message message{const_cast<char*>(data), bytes, job.shared_from_this(), std::move(then)};
  Peer& there = peers_[to];
  if (!job.name().meets && bytes <= NetFrame::kMostEager) {
    there.waiting.emplace_back(key, std::move(message));
    return pump(to);
  }
  const auto grant = there.grants.find(key);
  if (grant == there.grants.end()) {
    wires_.line_to(to).send_urgent(frame_of(NetKind::Offer, job, key, bytes));
    there.ungranted.emplace(key, std::move(message));
    return;
  }
  const Announced granted = grant->second;
  there.grants.erase(grant);
  if (granted.bytes != bytes) {
    wires_.line_to(to).send_urgent(frame_of(NetKind::Offer, job, key, bytes));
    --job.pending_;
    return fail(job, too_little(peer, granted.bytes, bytes));
  }
  transmit(to, NetKind::Data, key, std::move(message));
}

// Sends eager messages as far as there is credit.
void NetBox::pump(int peer) {
  Peer& there = peers_[peer];
  while (!there.waiting.empty()) {
    auto& [key, message] = there.waiting.front();
    if (there.out_count > 0 &&
        (there.out_count >= kMostCount || there.out_bytes + message.bytes > kMostOut)) {
      return;
    }
    ++there.out_count;
    there.out_bytes += message.bytes;
    const NetKey own = key;
    Message out = std::move(message);
    there.waiting.pop_front();
    transmit(peer, NetKind::Eager, own, std::move(out));
  }
}

void NetBox::transmit(int peer, NetKind kind, const NetKey& key, Message message) {
  NetJob* const job = message.job.get();
  const char* const data = message.data;
  const NetFrame frame = frame_of(kind, *job, key, message.bytes);
  wires_.line_to(peer).send(frame, data, job, [this, out = std::move(message)] { complete(out); });
}

void NetBox::recv(NetJob& job, int peer, uint32_t part, char* data, int64_t bytes, Then then) {
  if (job.is_over()) return;
  const int from = members_[static_cast<size_t>(peer)];
  ++job.pending_;
  const NetKey key = key_of(job, part);
  Peer& there = peers_[from];
  const auto refuse = [&](int64_t sent) {
    wires_.line_to(from).send_urgent(frame_of(NetKind::Grant, job, key, bytes));
    fail(job, too_many(peer, sent, bytes));
  };
  const auto offer = there.offers.find(key);
  if (offer != there.offers.end()) {
    const int64_t offered = offer->second.bytes;
    there.offers.erase(offer);
    if (offered != bytes) return refuse(offered);
  }
  const auto early = there.early.find(key);
  if (early != there.early.end()) {
    if (early->second->bytes != bytes) return refuse(early->second->bytes);
    there.posted.emplace(key, Message{data, bytes, job.shared_from_this(), std::move(then)});
    if (early->second->complete) {
      const auto here = early->second;
      early_is_here(from, key, here);
    }
    return;
  }
  if (auto why = silent(from)) return fail(job, {.what = *why, .peer = peer});
  there.posted.emplace(key, Message{data, bytes, job.shared_from_this(), std::move(then)});
  const bool eager = !job.name().meets && bytes <= NetFrame::kMostEager;
  NetLine& line = wires_.line_to(from);
  if (!eager) line.send_urgent(frame_of(NetKind::Grant, job, key, bytes));
}

// A message that came before its call.
void NetBox::early_is_here(int peer, const NetKey& key, const std::shared_ptr<Early>& early) {
  early->complete = true;
  Peer& there = peers_[peer];
  const auto posted = there.posted.find(key);
  if (posted == there.posted.end()) return;
  Message message = std::move(posted->second);
  there.posted.erase(posted);
  there.early.erase(key);
  if (early->bytes > 0)
    std::memcpy(message.data, early->data.get(), static_cast<size_t>(early->bytes));
  taken(peer, early->bytes);
  complete(std::move(message));
}

// The peer may send as much more.
void NetBox::taken(int peer, int64_t bytes) {
  Peer& there = peers_[peer];
  ++there.taken_count;
  there.taken_bytes += bytes;
  if (there.taken_count < kMostCount / 4 && there.taken_bytes < kMostOut / 4) return;
  wires_.line_to(peer).send_urgent({.kind = NetKind::Credit,
                                    .group = id_,
                                    .key = {.part = there.taken_count},
                                    .bytes = there.taken_bytes});
  there.taken_count = 0;
  there.taken_bytes = 0;
}

void NetBox::complete(Message message) {
  if (message.then) message.then();
  release(*message.job);
}

void NetBox::release(NetJob& job) {
  if (job.is_over() || --job.pending_ > 0) return;
  end(job);
}

void NetBox::end(NetJob& job) {
  const auto keep = open_.extract(call_key(job));
  job.over_.store(true, std::memory_order_release);
  wires_.changed();
}

void NetBox::fail(NetJob& job, NetFailure failure) {
  if (job.is_over()) return;
  job.failure_ = std::move(failure);
  const auto of_job = [&](const auto& entry) { return entry.second.job.get() == &job; };
  for (auto& [rank, peer] : peers_) {
    std::erase_if(peer.posted, of_job);
    std::erase_if(peer.ungranted, of_job);
    std::erase_if(peer.waiting, of_job);
  }
  wires_.forget(&job);
  end(job);
}

void NetBox::end_all(const NetFailure& failure) {
  while (!open_.empty()) {
    const auto job = open_.begin()->second;
    fail(*job, failure);
  }
}

void NetBox::abort(const std::string& why) {
  if (closed_) return;
  if (!dead_) dead_ = NetFailure{.what = why};
  end_all(*dead_);
  const std::string reason = why.substr(0, NetFrame::kMostReason);
  // Some may wait for a connection that this rank has yet to make.
  const bool few = members_.size() <= kFew;
  for (const int peer : members_) {
    if (peer == members_[static_cast<size_t>(rank_)] || silent(peer)) continue;
    NetLine& line = few ? wires_.line_to(peer) : wires_.line_if_any(peer);
    line.send_urgent(
        {.kind = NetKind::Abort, .group = id_, .bytes = static_cast<int64_t>(reason.size())},
        reason);
  }
}

void NetBox::leave() {
  if (closed_) return;
  // Not an abort: others may be in calls for which this rank has done its part.
  end_all({.what = "was left"});
  for (const int peer : members_) {
    if (dead_ || peer == members_[static_cast<size_t>(rank_)] || silent(peer)) continue;
    wires_.line_if_any(peer).send({.kind = NetKind::Leave, .group = id_});
  }
  closed_ = true;
  peers_.clear();
}

void NetBox::peer_aborted(int peer, const std::string& why) {
  if (closed_ || dead_) return;
  dead_ = NetFailure{.what = "aborted the group: " + why, .peer = member(peer)};
  end_all(*dead_);
}

void NetBox::lost(int peer, const std::vector<NetJob*>& unsent) {
  const auto why = silent(peer);
  if (closed_ || !why || !is_joined()) return;
  std::vector<NetJob*> jobs;
  for (const auto& [key, job] : open_) {
    if (std::find(unsent.begin(), unsent.end(), job.get()) != unsent.end())
      jobs.push_back(job.get());
  }
  const Peer& there = peers_[peer];
  for (const auto& [key, message] : there.posted) {
    const auto early = there.early.find(key);
    if (early == there.early.end() || !early->second->complete) jobs.push_back(message.job.get());
  }
  for (const auto& [key, message] : there.ungranted) jobs.push_back(message.job.get());
  for (const auto& [key, message] : there.waiting) jobs.push_back(message.job.get());
  for (NetJob* const job : jobs) {
    const bool still = std::any_of(open_.begin(), open_.end(),
                                   [&](const auto& entry) { return entry.second.get() == job; });
    if (still) fail(*job, {.what = *why, .peer = member(peer)});
  }
}

NetTarget NetBox::arrived(int peer, const NetFrame& frame) {
  if (frame.kind == NetKind::Abort) {
    const auto text = std::make_shared<std::string>(static_cast<size_t>(frame.bytes), '\0');
    return {.to = text->data(), .done = [this, peer, text] { peer_aborted(peer, *text); }};
  }
  if (closed_ || dead_) return {};
  Peer& there = peers_[peer];
  switch (frame.kind) {
    case NetKind::Eager:
    case NetKind::Data:
      return message(peer, frame);
    case NetKind::Offer: {
      if (!agrees(frame, call_of(peer, frame))) return {};
      const auto posted = there.posted.find(frame.key);
      if (posted == there.posted.end()) {
        there.offers[frame.key] = {frame.bytes, frame.checksum};
      } else if (posted->second.bytes != frame.bytes) {
        fail(*posted->second.job, too_many(member(peer), frame.bytes, posted->second.bytes));
      }
      return {};
    }
    case NetKind::Grant: {
      NetJob* const job = call_of(peer, frame);
      if (!agrees(frame, job)) return {};
      const auto waits = there.ungranted.find(frame.key);
      if (waits == there.ungranted.end()) {
        there.grants[frame.key] = {frame.bytes, frame.checksum};
      } else if (waits->second.bytes != frame.bytes) {
        fail(*job, too_little(member(peer), frame.bytes, waits->second.bytes));
      } else {
        Message message = std::move(waits->second);
        there.ungranted.erase(waits);
        transmit(peer, NetKind::Data, frame.key, std::move(message));
      }
      return {};
    }
    case NetKind::Credit:
      there.out_count -= std::min(there.out_count, frame.key.part);
      there.out_bytes -= std::min(there.out_bytes, frame.bytes);
      if (is_joined()) pump(peer);
      return {};
    case NetKind::Leave:
      there.left = true;
      lost(peer, {});
      return {};
    default:
      return {};
  }
}

// A message: to its place, or to where it waits for its call.
NetTarget NetBox::message(int peer, const NetFrame& frame) {
  if (!agrees(frame, call_of(peer, frame))) return {};
  Peer& there = peers_[peer];
  there.offers.erase(frame.key);
  const auto posted = there.posted.find(frame.key);
  if (posted != there.posted.end()) {
    if (posted->second.bytes != frame.bytes) {
      fail(*posted->second.job, too_many(member(peer), frame.bytes, posted->second.bytes));
      return {};
    }
    Message message = std::move(posted->second);
    there.posted.erase(posted);
    NetTarget target{.to = message.data, .job = message.job.get()};
    target.done = [this, peer, eager = frame.kind == NetKind::Eager, in = std::move(message)] {
      if (eager) taken(peer, in.bytes);
      complete(in);
    };
    return target;
  }
  if (frame.kind == NetKind::Data) return {};  // of a call that has failed since its grant
  auto early = std::make_shared<Early>();
  early->data.reset(new char[static_cast<size_t>(frame.bytes) + 1]);
  early->bytes = frame.bytes;
  early->checksum = frame.checksum;
  there.early[frame.key] = early;
  return {.to = early->data.get(), .done = [this, peer, key = frame.key, early] {
            if (!closed_) early_is_here(peer, key, early);
          }};
}

}  // namespace lockstep::comm

#include "comm/store/server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/network/tcp_options.h"
#include "core/process/thread.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// While no descriptor is left for a new client.
constexpr int kPauseMs = 100;
// Between two looks whether its end has come, once it was asked to.
constexpr int kLastSliceMs = 20;

// Clients that are not identified yet: as many as the ranks of a host that all connect at once, and
// no more than a quarter of the descriptors.
size_t most_unidentified_clients() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 16;
  return static_cast<size_t>(std::clamp<rlim_t>(limit.rlim_cur / 4, 8, 256));
}

// Of a client that is not identified yet: a handshake is shorter.
constexpr size_t kMostOfHandshake = 16 << 10;

}  // namespace

StoreServer::StoreServer(Fd listening, std::optional<Digest> key, std::function<bool()> is_job_over)
    : listening_(std::move(listening)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      events_(epoll_create1(EPOLL_CLOEXEC)),
      key_(std::move(key)),
      is_job_over_(std::move(is_job_over)),
      most_unidentified_(most_unidentified_clients()) {
  // A program that this process starts would hold the port after its end.
  fcntl(listening_.get(), F_SETFD, FD_CLOEXEC);
  if (!stop_ || !events_ || fcntl(listening_.get(), F_SETFL, O_NONBLOCK) != 0 ||
      !watch(stop_, EPOLLIN, &stop_) || !watch(listening_, EPOLLIN, &listening_)) {
    const int error = errno;
    throw CommError(
        fmt::format("[store] cannot serve: {}{}", std::strerror(error), advice_on_limit(error)));
  }
  try {
    thread_ = thread_without_signals([this] { serve(); });
  } catch (const std::exception& error) {
    throw CommError(fmt::format("[store] cannot serve: {}", error.what()));
  }
}

StoreServer::~StoreServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

// Tells of `events` at `fd`, from now on or, for one that is watched, instead of what it told
// before; `who` is a client, or the descriptor itself.
bool StoreServer::watch(const Fd& fd, uint32_t events, const void* who) {
  epoll_event event{.events = events, .data = {.ptr = const_cast<void*>(who)}};
  return epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd.get(), &event) == 0 ||
         (errno == EEXIST && epoll_ctl(events_.get(), EPOLL_CTL_MOD, fd.get(), &event) == 0);
}

bool StoreServer::has_ended(Clock::time_point asked) const {
  if (making_ <= 0) return true;
  const bool is_over = is_job_over_ && is_job_over_();
  return Clock::now() >= asked + (is_over ? kLingerWhenOver : kLinger);
}

void StoreServer::linger() const {
  const auto asked = Clock::now();
  while (!has_ended(asked)) std::this_thread::sleep_for(std::chrono::milliseconds(kLastSliceMs));
}

void StoreServer::serve() {
  bool accepts = true;
  std::optional<Clock::time_point> asked;  // to end
  while (!asked || !has_ended(*asked)) {
    epoll_event events[64];
    const int limit = asked ? kLastSliceMs : accepts ? -1 : kPauseMs;
    const int count = epoll_wait(events_.get(), events, 64, limit);
    bool knocks = !accepts;
    for (int i = 0; i < count; ++i) {
      void* const who = events[i].data.ptr;
      if (who == &stop_) {
        asked = Clock::now();
        watch(stop_, 0, &stop_);
        continue;
      }
      if (who == &listening_) {
        knocks = true;
        continue;
      }
      Client& client = *static_cast<Client*>(who);
      if (client.gone) continue;
      if ((events[i].events & EPOLLOUT) != 0) flush(client);
      if ((events[i].events & ~EPOLLOUT) != 0) read_from(client);
    }
    if (knocks) {
      const bool can = accept_all();
      if (can != accepts) watch(listening_, can ? uint32_t{EPOLLIN} : 0, &listening_);
      accepts = can;
    }
    end_waits();
    if (std::exchange(lost_, false)) {
      clients_.remove_if([](const Client& client) { return client.gone; });
    }
  }
}

// False when the system has no descriptor or memory for a client that waits for one.
bool StoreServer::accept_all() {
  for (;;) {
    Fd fd(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      const bool full = has_no_room(errno);
      if (full && drop_oldest_unidentified()) continue;
      return !full;
    }
    settle_connection(fd.get());
    Client& client = clients_.emplace_back(Client{.fd = std::move(fd)});
    if (!watch(client.fd, EPOLLIN, &client)) {
      clients_.pop_back();
      continue;
    }
    ++unidentified_;
    while (unidentified_ > most_unidentified_ && drop_oldest_unidentified()) {
    }
  }
}

// One that has just been identified stays; false when there was none to drop.
bool StoreServer::drop_oldest_unidentified() {
  for (Client& client : clients_) {
    if (client.identified || client.gone) continue;
    read_from(client);
    if (client.identified) continue;
    if (!client.gone) drop(client);
    client.fd.reset();  // the next may be waiting for it
    return true;
  }
  return false;
}

void StoreServer::drop(Client& client) {
  if (client.gone) return;
  client.gone = lost_ = true;
  client.waits = false;
  if (!client.identified) --unidentified_;
  buffered_ -= client.in.size() + client.out.size();
  client.in.clear();
  client.out.clear();
  client.sent = 0;
}

void StoreServer::read_from(Client& client) {
  char buffer[1 << 14];  // a thread's stack may be small (ulimit -s)
  const ssize_t count = recv(client.fd.get(), buffer, sizeof buffer, 0);
  if (count < 0 && is_temporary(errno)) return;
  if (count <= 0) return drop(client);
  std::string_view bytes(buffer, static_cast<size_t>(count));
  try {
    if (!key_) return take(client, bytes);
    if (!client.tls) {
      if (bytes[0] == static_cast<char>(StoreQuery::Validate)) {
        say(client, StoreMessage().number(kNeedsKey));
        throw Error("has no key");
      }
      client.tls = std::make_unique<Tls>(Tls::Role::Server, *key_);
    }
    const std::string plain = client.tls->feed(bytes);
    say(client, StoreMessage());
    if (!plain.empty()) take(client, plain);
  } catch (const std::exception&) {
    // Not one of ours, or out of step: there is no way back.
    drop(client);
  }
}

// Answers all requests that are complete.
void StoreServer::take(Client& client, std::string_view bytes) {
  client.in.append(bytes);
  buffered_ += bytes.size();
  std::string_view left = client.in;
  try {
    // Before a client is identified, no more is buffered of it than its handshake.
    if (!client.identified && client.in[0] != static_cast<char>(StoreQuery::Validate))
      throw Error("a client that is not identified");
    while (const auto request = take_request(left)) {
      answer(client, *request);
      if (client.gone) break;
    }
    if (!client.identified && left.size() > kMostOfHandshake)
      throw Error("a client that is not identified");
    if (left.size() > kMostText + kMostOfHandshake) throw Error("a request without end");
  } catch (const std::exception&) {
    return drop(client);
  }
  if (client.gone) return;
  const size_t done = client.in.size() - left.size();
  client.in.erase(0, done);
  buffered_ -= done;
  if (buffered_ > kMostBuffered) drop(client);
}

void StoreServer::say(Client& client, const StoreMessage& message) {
  if (client.gone) return;
  const size_t before = client.out.size();
  if (client.tls) {
    client.tls->write(message.bytes());
    client.out += client.tls->take_output();
  } else {
    client.out += message.bytes();
  }
  buffered_ += client.out.size() - before;
  if (buffered_ > kMostBuffered) return drop(client);
  if (before == 0 && !client.out.empty()) flush(client);
}

void StoreServer::flush(Client& client) {
  const bool was_full = client.full;
  while (!client.out.empty() && !client.gone) {
    const std::string_view left = std::string_view(client.out).substr(client.sent);
    const ssize_t count = send(client.fd.get(), left.data(), left.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      client.sent += static_cast<size_t>(count);
      // No more is moved than was sent: of a large answer each piece would move all of the rest.
      if (2 * client.sent < client.out.size()) continue;
      client.out.erase(0, client.sent);
      buffered_ -= std::exchange(client.sent, 0);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      drop(client);
    }
  }
  client.full = !client.out.empty();
  if (client.full != was_full)
    watch(client.fd, client.full ? EPOLLIN | EPOLLOUT : EPOLLIN, &client);
}

// False when there is no room. The client learns that with a Ping; no other request of it is taken
// before.
bool StoreServer::keep(Client& client, const std::function<void()>& put) {
  try {
    put();
  } catch (const Error&) {
    client.refused = true;
  }
  return !client.refused;
}

void StoreServer::answer(Client& client, const StoreRequest& request) {
  const auto& texts = request.texts;
  ++requests_;
  // It does not ask whether it was.
  if (client.refused && request.query != StoreQuery::Ping) throw Error("the store is full");
  switch (request.query) {
    case StoreQuery::Validate:
      if (request.number != kMagic) throw Error("another magic number");
      if (!client.identified) --unidentified_;
      client.identified = true;
      return;
    case StoreQuery::Set:
      keep(client, [&] { values_.put(texts[0], texts[1]); });
      return;
    case StoreQuery::CompareSet: {
      const std::string* const found = values_.find(texts[0]);
      if (found == nullptr && !texts[1].empty()) return say(client, StoreMessage().text(texts[1]));
      if (found != nullptr && *found != texts[1]) return say(client, StoreMessage().text(*found));
      const bool kept = keep(client, [&] { values_.put(texts[0], texts[2]); });
      return say(client, StoreMessage().text(texts[kept ? 2 : 1]));
    }
    case StoreQuery::Get:
      return say(client, StoreMessage().text(values_.at(texts[0])));
    case StoreQuery::Add: {
      std::optional<int64_t> sum;
      keep(client, [&] { sum = values_.add(texts[0], request.number); });
      return say(client, StoreMessage().number(sum.value_or(kNoNumber)));
    }
    case StoreQuery::Check: {
      const bool all =
          std::all_of(texts.begin(), texts.end(), [this](auto& key) { return values_.has(key); });
      return say(client, StoreMessage().number(all ? kReady : kNotReady));
    }
    // A key that was there may have been removed since.
    case StoreQuery::Wait:
    case StoreQuery::MultiGet:
      client.keys = texts;
      client.barrier.clear();
      client.gets = request.query == StoreQuery::MultiGet;
      return wait(client);
    case StoreQuery::CountKeys:
      return say(client, StoreMessage().number(static_cast<int64_t>(values_.all().size())));
    case StoreQuery::Delete:
      return say(client, StoreMessage().number(int64_t{values_.erase(texts[0]) ? 1 : 0}));
    case StoreQuery::Append:
      keep(client, [&] { values_.append(texts[0], texts[1]); });
      return;
    case StoreQuery::MultiSet:
      keep(client, [&] {
        for (size_t i = 0; i < texts.size(); i += 2) values_.put(texts[i], texts[i + 1]);
      });
      return;
    case StoreQuery::CancelWait:
      client.waits = false;
      client.barrier.clear();
      return say(client, StoreMessage().number(kWaitCancelled));
    case StoreQuery::Ping: {
      const auto number = static_cast<uint32_t>(request.number);
      return say(client,
                 StoreMessage().number(std::exchange(client.refused, false) ? ~number : number));
    }
    case StoreQuery::Push:
      keep(client, [&] { values_.push(texts[0], texts[1]); });
      return;
    case StoreQuery::Pop: {
      const auto oldest = values_.pop(texts[0]);
      if (!oldest) return say(client, StoreMessage().number(int64_t{0}));
      return say(client, StoreMessage().number(int64_t{1}).text(*oldest));
    }
    case StoreQuery::QueueLength:
      return say(client,
                 StoreMessage().number(static_cast<int64_t>(values_.queue_length(texts[0]))));
    case StoreQuery::ListKeys: {
      StoreMessage list;
      list.number(static_cast<int64_t>(values_.all().size()));
      for (const auto& [key, value] : values_.all()) list.text(key);
      return say(client, list);
    }
    case StoreQuery::Barrier:
      values_.add(texts[0], 1);
      client.barrier = texts[0];
      client.gets = false;
      client.sum = request.number;
      return wait(client);
  }
}

bool StoreServer::is_over(const Client& client) const {
  if (client.barrier.empty()) {
    return std::all_of(client.keys.begin(), client.keys.end(), [&](auto& key) {
      return client.gets ? values_.find(key) != nullptr : values_.has(key);
    });
  }
  return values_.number(client.barrier) >= client.sum;
}

// Answers when what the client waits for is there; otherwise it is checked again whenever a key
// changes.
void StoreServer::wait(Client& client) {
  client.waits = !is_over(client);
  if (client.waits) return;
  StoreMessage answer;
  if (std::exchange(client.gets, false)) {
    for (const std::string& key : client.keys) answer.text(values_.at(key));
  } else {
    answer.number(kStopWaiting);
  }
  client.keys.clear();
  client.barrier.clear();
  say(client, answer);
}

void StoreServer::end_waits() {
  if (!values_.take_changed()) return;
  making_ = values_.number(std::string(kMaking));
  for (Client& client : clients_) {
    if (client.waits) wait(client);
  }
}

}  // namespace lockstep::comm

#include "comm/store_server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// While no descriptor is left for a new client.
constexpr int kPauseMs = 100;

// Whether somebody may have waited for it.
bool changes(StoreQuery query) {
  switch (query) {
    case StoreQuery::Set:
    case StoreQuery::CompareSet:
    case StoreQuery::Add:
    case StoreQuery::Append:
    case StoreQuery::MultiSet:
    case StoreQuery::Push:
    case StoreQuery::Barrier:
      return true;
    default:
      return false;
  }
}

bool is_temporary(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

StoreServer::StoreServer(Fd listening)
    : listening_(std::move(listening)), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_ || fcntl(listening_.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw CommError(fmt::format("[store] cannot serve: {}", std::strerror(errno)));
  }
  // The program's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::exception& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw CommError(fmt::format("[store] cannot serve: {}", error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

StoreServer::~StoreServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void StoreServer::serve() {
  bool accepts = true;
  for (;;) {
    std::vector<pollfd> events{{stop_.get(), POLLIN, 0},
                               {listening_.get(), static_cast<short>(accepts ? POLLIN : 0), 0}};
    for (const Client& client : clients_) {
      events.push_back(
          {client.fd.get(), static_cast<short>(client.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    }
    poll(events.data(), events.size(), accepts ? -1 : kPauseMs);
    if (events[0].revents != 0) return;
    auto event = events.begin() + 2;
    for (Client& client : clients_) {
      if ((event->revents & ~POLLOUT) != 0) read_from(client);
      ++event;
    }
    end_waits();
    for (Client& client : clients_) write_to(client);
    clients_.remove_if([](const Client& client) { return client.gone; });
    if (events[1].revents != 0 || !accepts) accepts = accept_all();
  }
}

// Whether more may come.
bool StoreServer::accept_all() {
  for (;;) {
    Fd fd(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    // A host that is gone for good takes its connections along in time.
    setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    clients_.push_back({.fd = std::move(fd)});
  }
}

void StoreServer::read_from(Client& client) {
  char buffer[1 << 16];
  const ssize_t count = recv(client.fd.get(), buffer, sizeof buffer, 0);
  if (count < 0 && is_temporary(errno)) return;
  if (count <= 0) {
    client.gone = true;
    return;
  }
  client.in.append(buffer, static_cast<size_t>(count));
  std::string_view left = client.in;
  try {
    while (const auto request = take_request(left)) answer(client, *request);
  } catch (const std::exception&) {
    // Not one of ours, or out of step: there is no way back.
    client.gone = true;
  }
  client.in.erase(0, client.in.size() - left.size());
}

void StoreServer::write_to(Client& client) {
  if (client.out.empty() || client.gone) return;
  const ssize_t count = send(client.fd.get(), client.out.data(), client.out.size(), MSG_NOSIGNAL);
  if (count > 0) client.out.erase(0, static_cast<size_t>(count));
  if (count < 0 && !is_temporary(errno)) client.gone = true;
}

void StoreServer::answer(Client& client, const StoreRequest& request) {
  const auto& texts = request.texts;
  const auto say = [&client](const StoreMessage& message) { client.out += message.bytes(); };
  if (!client.known && request.query != StoreQuery::Validate) throw Error("no magic number");
  changed_ = changed_ || changes(request.query);
  switch (request.query) {
    case StoreQuery::Validate:
      if (request.number != kMagic) throw Error("another magic number");
      client.known = true;
      return;
    case StoreQuery::Set:
      values_[texts[0]] = texts[1];
      return;
    case StoreQuery::CompareSet: {
      const auto found = values_.find(texts[0]);
      const bool absent = found == values_.end();
      if (absent && !texts[1].empty()) return say(StoreMessage().text(texts[1]));
      if (!absent && found->second != texts[1]) return say(StoreMessage().text(found->second));
      values_[texts[0]] = texts[2];
      return say(StoreMessage().text(texts[2]));
    }
    case StoreQuery::Get:
      return say(StoreMessage().text(values_.at(texts[0])));
    case StoreQuery::Add:
      return say(StoreMessage().number(add(texts[0], request.number)));
    case StoreQuery::Check: {
      const bool all =
          std::all_of(texts.begin(), texts.end(), [this](auto& key) { return has(key); });
      return say(StoreMessage().number(all ? kReady : kNotReady));
    }
    case StoreQuery::Wait:
      client.keys = texts;
      return wait(client);
    case StoreQuery::CountKeys:
      return say(StoreMessage().number(static_cast<int64_t>(values_.size())));
    case StoreQuery::Delete:
      return say(StoreMessage().number(static_cast<int64_t>(values_.erase(texts[0]))));
    case StoreQuery::Append:
      values_[texts[0]] += texts[1];
      return;
    case StoreQuery::MultiGet:
      for (const std::string& key : texts) say(StoreMessage().text(values_.at(key)));
      return;
    case StoreQuery::MultiSet:
      for (size_t i = 0; i < texts.size(); i += 2) values_[texts[i]] = texts[i + 1];
      return;
    case StoreQuery::CancelWait:
      client.waits = false;
      client.barrier.clear();
      return say(StoreMessage().number(kWaitCancelled));
    case StoreQuery::Ping:
      return say(StoreMessage().number(static_cast<uint32_t>(request.number)));
    case StoreQuery::Push:
      queues_[texts[0]].push_back(texts[1]);
      return;
    case StoreQuery::Pop: {
      const auto queue = queues_.find(texts[0]);
      if (queue == queues_.end()) return say(StoreMessage().number(int64_t{0}));
      say(StoreMessage().number(int64_t{1}).text(queue->second.front()));
      queue->second.pop_front();
      if (queue->second.empty()) queues_.erase(queue);
      return;
    }
    case StoreQuery::QueueLength: {
      const auto queue = queues_.find(texts[0]);
      return say(StoreMessage().number(
          static_cast<int64_t>(queue == queues_.end() ? 0 : queue->second.size())));
    }
    case StoreQuery::ListKeys: {
      StoreMessage list;
      list.number(static_cast<int64_t>(values_.size()));
      for (const auto& [key, value] : values_) list.text(key);
      return say(list);
    }
    case StoreQuery::Barrier:
      add(texts[0], 1);
      client.barrier = texts[0];
      client.sum = request.number;
      return wait(client);
  }
}

// A value that is no number counts as 0.
int64_t StoreServer::add(const std::string& key, int64_t amount) {
  std::string& value = values_[key];
  int64_t sum = 0;
  std::from_chars(value.data(), value.data() + value.size(), sum);
  // Past its end it begins anew, as it would without a check.
  sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(amount));
  value = std::to_string(sum);
  return sum;
}

bool StoreServer::has(const std::string& key) const {
  return values_.contains(key) || queues_.contains(key);
}

bool StoreServer::is_over(const Client& client) const {
  if (client.barrier.empty()) {
    return std::all_of(client.keys.begin(), client.keys.end(),
                       [this](auto& key) { return has(key); });
  }
  const auto found = values_.find(client.barrier);
  int64_t sum = 0;
  if (found != values_.end()) {
    std::from_chars(found->second.data(), found->second.data() + found->second.size(), sum);
  }
  return sum >= client.sum;
}

// Says so when what it waits for is there; otherwise it is looked at again whenever something
// changes.
void StoreServer::wait(Client& client) {
  client.waits = !is_over(client);
  if (client.waits) return;
  client.keys.clear();
  client.barrier.clear();
  client.out += StoreMessage().number(kStopWaiting).bytes();
}

void StoreServer::end_waits() {
  if (!std::exchange(changed_, false)) return;
  for (Client& client : clients_) {
    if (client.waits) wait(client);
  }
}

}  // namespace lockstep::comm

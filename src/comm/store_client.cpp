#include "comm/store_client.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "comm/later.h"
#include "comm/look_up.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using Deadline = StoreClient::Deadline;
using Clock = StoreClient::Clock;

// Between two tries to connect: at first, and at most.
constexpr auto kFirstPause = 10ms;
constexpr auto kLongestPause = 500ms;
// How long an address is tried: behind it may be another, or a host that has only just started.
constexpr auto kEach = 3s;
// For the server to say that it no longer waits.
constexpr auto kCancelled = 1s;
// Between two looks whether waiting is in vain, and what an answer may take once it is.
constexpr auto kSlice = 50ms;
constexpr auto kLastAnswer = 100ms;

constexpr const char* kUnanswered =
    "no answer: the process that serves it has ended or is stopped, or its host is cut off";

// How long a call waits.
class Patience {
 public:
  Patience(Deadline deadline, const StoreClient::Heed& heed) : heed_(heed), deadline_(deadline) {}

  std::chrono::milliseconds left() const {
    return std::max(0ms, std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now()));
  }
  // For one wait, before the next look().
  std::chrono::milliseconds slice() const {
    return heed_ ? std::min(left(), 0ms + kSlice) : left();
  }
  // What comes in addition; what has been heard stays.
  void extend(Clock::duration time) {
    deadline_ = Clock::now() + (why_ ? std::min<Clock::duration>(time, kLastAnswer) : time);
  }
  Patience at_most(Clock::duration time) const {
    Patience shorter = *this;
    shorter.deadline_ = std::min(deadline_, Clock::now() + time);
    return shorter;
  }
  void look() {
    if (!heed_ || why_) return;
    why_ = heed_();
    if (why_) deadline_ = std::min(deadline_, Clock::now() + kLastAnswer);
  }
  // It is over.
  [[noreturn]] void fail(const std::string& otherwise) const {
    if (why_) throw StoreGivenUp(*why_);
    throw StoreFailure(otherwise);
  }

 private:
  const StoreClient::Heed& heed_;
  Deadline deadline_;
  std::optional<std::string> why_;
};

[[noreturn]] void closed(std::string_view why) {
  throw StoreFailure(
      fmt::format("the connection is closed ({}): the process that serves it has ended", why));
}

// Waits until the socket can be read from (POLLIN) or written to (POLLOUT); false when it is over.
bool is_ready(int fd, short event, Patience& patience) {
  for (;;) {
    pollfd one{fd, event, 0};
    const int64_t slice = std::min<int64_t>(patience.slice().count(), 1'000'000);
    const int ready = poll(&one, 1, static_cast<int>(slice));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) closed(std::strerror(errno));
    patience.look();
    if (patience.left() == 0ms) return false;
  }
}

void await(int fd, short event, Patience& patience) {
  if (!is_ready(fd, event, patience)) patience.fail(kUnanswered);
}

// A lookup has no deadline of its own; an address needs none.
Found look_up_within(const std::string& host, int port, Patience& patience) {
  Found found = look_up(host, port, AI_NUMERICHOST);
  if (found.error != 0) {
    Later later([host, port] { return look_up(host, port); });
    while (!later.is_over(patience.slice())) {
      patience.look();
      if (patience.left() == 0ms) patience.fail("the name server does not answer");
    }
    found = later.get();
  }
  if (found.error == 0) return found;
  throw StoreFailure(fmt::format("the name is not known ({})", gai_strerror(found.error)));
}

Fd connect_to(const addrinfo& there, Patience& patience) {
  Fd fd(socket(there.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw StoreFailure(fmt::format("no socket ({})", std::strerror(errno)));
  int error = 0;
  if (connect(fd.get(), there.ai_addr, there.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS || error == EINTR) {
      await(fd.get(), POLLOUT, patience);
      socklen_t length = sizeof error;
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  if (error != 0) throw StoreFailure(fmt::format("no connection ({})", std::strerror(error)));
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

void send_all(int fd, std::string_view bytes, Patience& patience) {
  while (!bytes.empty()) {
    const ssize_t count = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      await(fd, POLLOUT, patience);
    } else if (errno != EINTR) {
      closed(std::strerror(errno));
    }
  }
}

void receive_all(int fd, char* to, size_t count, Patience& patience) {
  while (count > 0) {
    const ssize_t got = recv(fd, to, count, 0);
    if (got == 0) closed("its end");
    if (got > 0) {
      to += got;
      count -= static_cast<size_t>(got);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      await(fd, POLLIN, patience);
    } else if (errno != EINTR) {
      closed(std::strerror(errno));
    }
  }
}

template <class T>
T receive(int fd, Patience& patience) {
  T value;
  receive_all(fd, reinterpret_cast<char*>(&value), sizeof value, patience);
  return value;
}

std::string receive_text(int fd, Patience& patience) {
  const auto length = receive<uint64_t>(fd, patience);
  if (length > kMostText) throw StoreFailure(fmt::format("an answer of {} bytes is none", length));
  std::string text(length, '\0');
  receive_all(fd, text.data(), text.size(), patience);
  return text;
}

StoreMessage about(StoreQuery query, const std::vector<std::string>& keys) {
  StoreMessage message(query);
  message.number<uint64_t>(keys.size());
  for (const std::string& key : keys) message.text(key);
  return message;
}

// A connection on which the server has answered: it may accept before it serves.
Fd greeted(const addrinfo& there, Patience& patience) {
  Patience shorter = patience.at_most(kEach);
  Fd fd = connect_to(there, shorter);
  const uint32_t ping = static_cast<uint32_t>(getpid());
  send_all(fd.get(),
           StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
               StoreMessage(StoreQuery::Ping).number(ping).bytes(),
           patience);
  if (receive<uint32_t>(fd.get(), patience) != ping) throw StoreFailure("who answers is no store");
  return fd;
}

}  // namespace

StoreClient::StoreClient(const std::string& host, int port, Deadline deadline, Heed heed)
    : heed_(std::move(heed)) {
  Patience patience(deadline, heed_);
  std::string failure;
  for (auto pause = std::chrono::milliseconds(kFirstPause);;
       pause = std::min(2 * pause, kLongestPause + 0ms)) {
    try {
      const Found found = look_up_within(host, port, patience);
      for (const addrinfo* one = found.addresses.get(); one != nullptr; one = one->ai_next) {
        try {
          fd_ = greeted(*one, patience);
          return;
        } catch (const StoreFailure& error) {
          failure = error.what();
        }
      }
    } catch (const StoreFailure& error) {
      failure = error.what();
    }
    for (auto left = pause; left > 0ms && patience.left() > 0ms; left -= kSlice) {
      std::this_thread::sleep_for(std::min({left, kSlice + 0ms, patience.left()}));
      patience.look();
    }
    if (patience.left() == 0ms) patience.fail(failure);
  }
}

// A turn on the connection: the requests and answers of one call. One that ends early, between a
// request and the end of its answer, closes the connection: the next would read this one's answer.
class StoreClient::Call {
 public:
  Call(StoreClient& client, Deadline deadline)
      : client_(client), patience_(deadline, client.heed_) {
    std::unique_lock lock(client_.mutex_);
    if (!client_.free_.wait_until(lock, deadline, [this] { return !client_.busy_; })) {
      throw StoreFailure("a call of another thread still waits on the connection");
    }
    if (!client_.fd_) {
      throw StoreFailure("the connection was closed when an answer failed to come");
    }
    client_.busy_ = true;
  }
  ~Call() {
    const std::lock_guard lock(client_.mutex_);
    if (!whole_) client_.fd_.reset();
    client_.busy_ = false;
    client_.free_.notify_all();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Call& ask(const StoreMessage& message) {
    send_all(client_.fd_.get(), message.bytes(), patience_);
    return *this;
  }
  template <class T>
  T number() {
    return receive<T>(client_.fd_.get(), patience_);
  }
  std::string text() { return receive_text(client_.fd_.get(), patience_); }

  // False when it is over before anything of the answer has come.
  bool is_answered() { return is_ready(client_.fd_.get(), POLLIN, patience_); }
  Patience& patience() { return patience_; }
  void done() { whole_ = true; }

 private:
  StoreClient& client_;
  Patience patience_;
  bool whole_ = false;
};

void StoreClient::set(std::string_view key, std::string_view value, Deadline deadline) {
  Call(*this, deadline).ask(StoreMessage(StoreQuery::Set).text(key).text(value)).done();
}

void StoreClient::append(std::string_view key, std::string_view value, Deadline deadline) {
  Call(*this, deadline).ask(StoreMessage(StoreQuery::Append).text(key).text(value)).done();
}

std::string StoreClient::compare_set(std::string_view key, std::string_view expected,
                                     std::string_view wanted, Deadline deadline) {
  Call call(*this, deadline);
  std::string now =
      call.ask(StoreMessage(StoreQuery::CompareSet).text(key).text(expected).text(wanted)).text();
  call.done();
  return now;
}

std::vector<std::string> StoreClient::get(const std::vector<std::string>& keys, Deadline deadline) {
  Call call(*this, deadline);
  call.ask(about(StoreQuery::MultiGet, keys));
  std::vector<std::string> values;
  for (size_t i = 0; i < keys.size(); ++i) values.push_back(call.text());
  call.done();
  return values;
}

void StoreClient::wait(const std::vector<std::string>& keys, Deadline deadline) {
  Call call(*this, deadline);
  call.ask(about(StoreQuery::Wait, keys));
  const bool answered = call.is_answered();
  call.patience().extend(kCancelled);
  if (answered) {
    call.number<char>();
    return call.done();
  }
  call.ask(StoreMessage(StoreQuery::CancelWait));
  // They may have come at the last moment.
  const bool came = call.number<char>() == kStopWaiting;
  if (came) call.number<char>();
  call.done();
  if (!came) call.patience().fail("nobody has set it in time");
}

bool StoreClient::check(const std::vector<std::string>& keys, Deadline deadline) {
  Call call(*this, deadline);
  const bool all = call.ask(about(StoreQuery::Check, keys)).number<char>() == kReady;
  call.done();
  return all;
}

int64_t StoreClient::add(std::string_view key, int64_t amount, Deadline deadline) {
  Call call(*this, deadline);
  const auto sum =
      call.ask(StoreMessage(StoreQuery::Add).text(key).number(amount)).number<int64_t>();
  call.done();
  return sum;
}

bool StoreClient::erase(std::string_view key, Deadline deadline) {
  Call call(*this, deadline);
  const bool was = call.ask(StoreMessage(StoreQuery::Delete).text(key)).number<int64_t>() > 0;
  call.done();
  return was;
}

int64_t StoreClient::count_keys(Deadline deadline) {
  Call call(*this, deadline);
  const auto count = call.ask(StoreMessage(StoreQuery::CountKeys)).number<int64_t>();
  call.done();
  return count;
}

}  // namespace lockstep::comm

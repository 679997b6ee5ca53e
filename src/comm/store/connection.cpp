#include "comm/store/connection.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/later.h"
#include "comm/store/protocol.h"
#include "core/network/address.h"
#include "core/network/tcp_options.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/place.h"

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;
using Clock = StorePatience::Clock;

// Between two tries to connect: at first, and at most.
constexpr auto kFirstPause = 10ms;
constexpr auto kLongestPause = 500ms;
// How long an address is tried: behind it may be another, or a host that has only just started.
constexpr auto kEach = 3s;
// A server that has not answered within this is taken for stopped.
constexpr auto kAnswers = 1s;
// Between two checks whether to stop waiting, and how long an answer may take after that.
constexpr auto kSlice = 50ms;
constexpr auto kLastAnswer = 100ms;

[[noreturn]] void closed(std::string_view why) {
  throw StoreFailure(
      fmt::format("the connection is closed ({}): the process that serves it has ended", why));
}

// Waits until the socket can be read from (POLLIN) or written to (POLLOUT); false when it is over.
bool is_ready(int fd, short event, StorePatience& patience) {
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

void await(int fd, short event, StorePatience& patience) {
  if (!is_ready(fd, event, patience)) patience.fail(StoreLine::kUnanswered);
}

// A lookup has no deadline of its own; an address needs none.
Resolved resolve_within(const std::string& host, uint16_t port, StorePatience& patience) {
  Resolved found = resolve(host, port, AI_NUMERICHOST);
  if (found.error != 0) {
    Later later([host, port] { return resolve(host, port); });
    while (!later.is_over(patience.slice())) {
      patience.look();
      if (patience.left() == 0ms) patience.fail("the name server does not answer");
    }
    found = later.get();
  }
  if (found.error == 0) return found;
  throw StoreFailure(fmt::format("the name is not known ({})", gai_strerror(found.error)));
}

Fd connect_to(const Address& there, StorePatience& patience) {
  Fd fd(socket(there.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw StoreFailure(fmt::format("no socket ({})", std::strerror(errno)));
  settle_connection(fd.get());
  int error = 0;
  if (connect(fd.get(), there.generic(), there.length) != 0) {
    error = errno;
    if (error == EINPROGRESS || error == EINTR) {
      await(fd.get(), POLLOUT, patience);
      socklen_t length = sizeof error;
      getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  const auto text = [error] { return fmt::format("no connection ({})", std::strerror(error)); };
  if (error == ECONNREFUSED) throw StoreAbsent(text());
  if (error == ENETUNREACH && there.storage.ss_family == AF_INET && there.is_loopback()) {
    throw StoreUnreachable("the loopback interface is down: ip link set lo up");
  }
  if (error != 0) throw StoreFailure(text());
  return fd;
}

// A connection on which the server has answered: it may accept before it serves.
std::unique_ptr<StoreLine> greeted(const Address& there, const std::optional<Digest>& key,
                                   StorePatience& patience) {
  StorePatience shorter = patience.at_most(kEach);
  auto line = std::make_unique<StoreLine>(connect_to(there, shorter), key);
  const uint32_t ping = static_cast<uint32_t>(getpid());
  line->send(StoreMessage(StoreQuery::Validate).number(kMagic).bytes() +
                 StoreMessage(StoreQuery::Ping).number(ping).bytes(),
             patience);
  const auto answer = line->number<uint32_t>(patience);
  if (answer == kNeedsKey) {
    throw StoreFailure(fmt::format(
        "it serves only ranks that have the job's secret, and this one has no {} and no "
        "LOCKSTEP_TOKEN_FILE",
        kJobKeyVariable));
  }
  if (answer != ping) throw StoreFailure("the server there is not a store");
  return line;
}

// A name may have several addresses.
std::string text_of(const std::map<std::string, std::string>& failures) {
  if (failures.size() == 1) return failures.begin()->second;
  std::vector<std::string> all;
  for (const auto& [address, failure] : failures) all.push_back(address + ": " + failure);
  return fmt::format("{}", fmt::join(all, "; "));
}

// Of a large job, one line from each host will do.
bool is_first_of_host() try {
  return rank_from_env().local_rank.value_or(0) == 0;
} catch (const ConfigError&) {  // a store that a program uses without these variables
  return true;
}

}  // namespace

std::chrono::milliseconds StorePatience::left() const {
  return std::max(0ms, std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now()));
}

std::chrono::milliseconds StorePatience::slice() const {
  return heed_ ? std::min(left(), 0ms + kSlice) : left();
}

void StorePatience::extend(Clock::duration time) {
  deadline_ = Clock::now() + (why_ ? std::min<Clock::duration>(time, kLastAnswer) : time);
}

StorePatience StorePatience::at_most(Clock::duration time) const {
  StorePatience shorter = *this;
  shorter.deadline_ = std::min(deadline_, Clock::now() + time);
  return shorter;
}

void StorePatience::look() {
  if (!heed_ || why_) return;
  why_ = heed_();
  if (why_) deadline_ = std::min(deadline_, Clock::now() + kLastAnswer);
}

StoreLine::StoreLine(Fd fd, const std::optional<Digest>& key) : fd_(std::move(fd)) {
  if (key) tls_ = std::make_unique<Tls>(Tls::Role::Client, *key);
}

void StoreLine::send(std::string_view bytes, StorePatience& patience) {
  if (!tls_) return send_raw(bytes, patience);
  tls_->write(bytes);
  send_raw(tls_->take_output(), patience);
}

std::string StoreLine::receive(size_t count, StorePatience& patience) {
  while (in_.size() - used_ < count) more(patience);
  std::string bytes = in_.substr(used_, count);
  used_ += count;
  if (used_ == in_.size()) {
    in_.clear();
    used_ = 0;
  }
  return bytes;
}

std::string StoreLine::text(StorePatience& patience) {
  const auto length = number<uint64_t>(patience);
  if (length > kMostText) {
    throw StoreFailure(fmt::format("an answer of {} bytes is none", length));
  }
  return receive(length, patience);
}

bool StoreLine::is_answered(StorePatience& patience) {
  while (in_.size() == used_) {
    if (!is_ready(fd_.get(), POLLIN, patience)) return false;
    more(patience);
  }
  return true;
}

void StoreLine::send_raw(std::string_view bytes, StorePatience& patience) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      await(fd_.get(), POLLOUT, patience);
    } else if (errno != EINTR) {
      closed(std::strerror(errno));
    }
  }
}

void StoreLine::more(StorePatience& patience) {
  char buffer[1 << 14];  // a thread's stack may be small (ulimit -s)
  const ssize_t got = recv(fd_.get(), buffer, sizeof buffer, 0);
  if (got > 0) {
    const std::string_view bytes(buffer, static_cast<size_t>(got));
    if (!tls_) {
      in_ += bytes;
      return;
    }
    try {
      in_ += tls_->feed(bytes);
    } catch (const TlsError& error) {
      throw StoreFailure(
          fmt::format("the server there does not know this job's secret ({})", error.what()));
    }
    send_raw(tls_->take_output(), patience);
  } else if (got == 0) {
    if (tls_ && !tls_->is_open()) {
      throw StoreFailure(
          "the server closed the connection to a rank that has the job's secret: it has none, or "
          "another");
    }
    closed("its end");
  } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
    await(fd_.get(), POLLIN, patience);
  } else if (errno != EINTR) {
    closed(std::strerror(errno));
  }
}

std::unique_ptr<StoreLine> StoreLine::meet(const std::string& host, int port,
                                           const std::optional<Digest>& key,
                                           StorePatience& patience, bool was_there) {
  std::string failure;
  std::map<std::string, std::string> failures;  // by address
  // Of all the time, which a user may take for a job that does nothing.
  auto silent_until = Clock::now() + patience.left() / 10;
  for (auto pause = std::chrono::milliseconds(kFirstPause);;
       pause = std::min(2 * pause, kLongestPause + 0ms)) {
    bool may_be_there = !was_there;
    try {
      const Resolved found = resolve_within(host, static_cast<uint16_t>(port), patience);
      for (const Address& one : found.addresses) {
        const auto begin = Clock::now();
        try {
          return greeted(one, key, patience);
        } catch (const StoreUnreachable&) {
          throw;
        } catch (const StoreFailure& error) {
          if (dynamic_cast<const StoreAbsent*>(&error) == nullptr) may_be_there = true;
          // The error of an attempt that the deadline interrupts says less than those before it.
          const bool is_cut = patience.left() == 0ms && Clock::now() - begin < kAnswers;
          std::string& last = failures[one.host()];
          if (last.empty() || !is_cut) last = error.what();
        }
      }
      failure = text_of(failures);
    } catch (const StoreUnreachable&) {
      throw;
    } catch (const StoreFailure& error) {
      may_be_there = true;
      failure = error.what();
    }
    if (!may_be_there) throw StoreFailure(failure + ": the process that serves it has ended");
    for (auto left = pause; left > 0ms && patience.left() > 0ms; left -= kSlice) {
      std::this_thread::sleep_for(std::min({left, kSlice + 0ms, patience.left()}));
      patience.look();
    }
    if (patience.left() == 0ms) patience.fail(failure);
    if (Clock::now() < silent_until) continue;
    silent_until = Clock::time_point::max();
    if (!is_first_of_host()) continue;
    log::warn(fmt::format(
        "[store] {} cannot be reached yet: {}; trying for another {:.0f} s (does rank 0 run there, "
        "and does every firewall on the way let this host reach the port?)",
        Endpoint{host, static_cast<uint16_t>(port)}.text(), failure,
        std::chrono::duration<double>(patience.left()).count()));
  }
}

}  // namespace lockstep::comm

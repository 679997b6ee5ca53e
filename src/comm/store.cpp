#include "comm/store.h"

#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "comm/text.h"
#include "comm/within.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// Silences libtorch, which logs every attempt that fails, with a backtrace; the errors below say it
// once, in a line. For the whole process, as libtorch has it: threads are counted.
class Quiet {
 public:
  Quiet() {
    const std::lock_guard lock(mutex());
    if (count()++ == 0) level() = std::exchange(FLAGS_caffe2_log_level, kFatal);
  }
  ~Quiet() {
    const std::lock_guard lock(mutex());
    if (--count() == 0) FLAGS_caffe2_log_level = level();
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  static constexpr int kFatal = 3;
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static int& count() {
    static int count = 0;
    return count;
  }
  static int& level() {
    static int level = 0;
    return level;
  }
};

// The store's server and Gloo write to peers that may be gone, without MSG_NOSIGNAL; Python, which they
// were made for, ignores the signal from the start.
void survive_broken_connections() {
  struct sigaction now{};
  sigaction(SIGPIPE, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

// Behind libtorch's own deadlines, whose errors say more.
constexpr std::chrono::seconds kSlack(1);

// Runs `call`, which owns what it uses; whatever libtorch throws, and no answer at all, becomes a
// CommError that says what was tried.
template <class Call>
auto guarded(const Store& store, std::string_view what, std::chrono::milliseconds timeout, Call call) {
  const Quiet quiet;
  try {
    return within(timeout + kSlack, std::move(call));
  } catch (const std::exception& error) {
    throw CommError(fmt::format(
        "[store] {} at {} failed: {}; look at whether the process that serves the store still runs",
        what, store.address(), first_line(error)));
  }
}

std::string advice(const StoreOptions& options, std::string_view reason) {
  if (reason.find("EADDRINUSE") != reason.npos || reason.find("in use") != reason.npos) {
    return fmt::format(
        "another process listens on port {}: end it, or set MASTER_PORT to a free one on every "
        "rank",
        options.port);
  }
  if (options.server) {
    return fmt::format(
        "this rank serves it, so {} must be an address of this host: set MASTER_ADDR",
        options.host);
  }
  return fmt::format(
      "nobody answered within {}: look at whether rank 0 runs there, whether MASTER_ADDR and "
      "MASTER_PORT are the same on every rank, and whether a firewall closes the port",
      text_of(options.timeout));
}

// A socket that listens on the one interface that `host` names; libtorch's own would listen on all.
// Nothing when there is none: libtorch's error then says why.
std::optional<int> listen_at(const std::string& host, int port) {
  addrinfo wanted{};
  wanted.ai_family = AF_INET;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
      bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
    return fd;
  }
  if (fd >= 0) close(fd);
  return {};
}

}  // namespace

Store Store::connect(const StoreOptions& options) {
  survive_broken_connections();
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(options.port);
  tcp.isServer = options.server;
  tcp.numWorkers = options.world_size;
  // A client is counted, which a Python server waits for; a server of ours waits for nobody: ranks
  // wait for each other when they join a group, with an error that names who is missing.
  tcp.waitWorkers = !options.server;
  tcp.timeout = options.timeout;
  tcp.multiTenant = true;
  tcp.masterListenFd = options.listen_fd;
  if (options.server && !options.listen_fd) {
    tcp.masterListenFd = listen_at(options.host, options.port);
  }
  tcp.useLibUV = true;
  const Quiet quiet;
  try {
    const auto make = [host = options.host, tcp] { return c10::make_intrusive<c10d::TCPStore>(host, tcp); };
    return Store(within(options.timeout + kSlack, make), options.host, options.port);
  } catch (const std::exception& error) {
    const std::string reason = first_line(error);
    throw CommError(fmt::format("[store] {}:{} cannot be {}: {}; {}", options.host, options.port,
                                options.server ? "opened" : "reached", reason,
                                advice(options, reason)));
  }
}

void Store::set(const std::string& key, std::string_view value) const {
  guarded(*this, fmt::format("set {}", key), raw_->getTimeout(),
          [raw = raw_, key, text = std::string(value)] { raw->set(key, text); });
}

std::string Store::get(const std::string& key, std::chrono::milliseconds timeout) const {
  wait({key}, timeout);
  return guarded(*this, fmt::format("get {}", key), timeout, [raw = raw_, key] { return raw->get_to_str(key); });
}

void Store::wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) const {
  guarded(*this, fmt::format("wait for {}", fmt::join(keys, ", ")), timeout,
          [raw = raw_, keys, timeout] { raw->wait(keys, timeout); });
}

bool Store::check(const std::vector<std::string>& keys) const {
  return guarded(*this, fmt::format("check of {}", fmt::join(keys, ", ")), raw_->getTimeout(),
                 [raw = raw_, keys] { return raw->check(keys); });
}

int64_t Store::add(const std::string& key, int64_t amount) const {
  return guarded(*this, fmt::format("add to {}", key), raw_->getTimeout(),
                 [raw = raw_, key, amount] { return raw->add(key, amount); });
}

Store Store::prefix(const std::string& name) const {
  return Store(c10::make_intrusive<c10d::PrefixStore>(name, raw_), host_, port_);
}

Store Store::clone(std::chrono::milliseconds timeout) const {
  auto copy = guarded(*this, "a second connection", raw_->getTimeout(),
                      [raw = raw_] { return raw->clone(); });
  copy->setTimeout(timeout);
  return Store(std::move(copy), host_, port_);
}

}  // namespace lockstep::comm

#include "comm/store/store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netdb.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "comm/store/client.h"
#include "comm/store/server.h"
#include "comm/text.h"
#include "core/network/address.h"
#include "core/process/own_process.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// For the answer to a question that the server can answer at once.
constexpr std::chrono::seconds kAnswer{2};

std::string advice(const StoreOptions& options, int error) {
  if (error == EADDRINUSE) {
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
      "no answer within {}: look at whether rank 0 runs there, whether MASTER_ADDR and "
      "MASTER_PORT are the same on every rank, and whether a firewall closes the port",
      text_of(options.timeout));
}

[[noreturn]] void unreachable(const StoreOptions& options, std::string_view reason, int error = 0) {
  throw CommError(fmt::format("[store] {}:{} cannot be {}: {}; {}", options.host, options.port,
                              options.server ? "opened" : "reached", reason,
                              advice(options, error)));
}

// Of a name that hosts have for themselves alone, such as Debian's 127.0.1.1 for its own;
// "localhost" and addresses mean what they say.
bool is_only_for_itself(const std::string& host, const Address& found) {
  const bool says_so = host == "localhost" || host.find_first_not_of("0123456789.") == host.npos ||
                       host.find(':') != host.npos;
  return !says_so && found.storage.ss_family == AF_INET && found.is_loopback();
}

// Listens on the one interface that `host` names; on all where it names none of this host, as the
// address of a Kubernetes service or one that a router translates, or none that others can reach.
Fd listening(const StoreOptions& options) {
  if (options.listen_fd) return Fd(*options.listen_fd);
  const auto port = static_cast<uint16_t>(options.port);
  const Resolved found = resolve(options.host, port);
  if (found.error != 0)
    unreachable(options, fmt::format("the name is not known ({})", gai_strerror(found.error)));
  for (const Address& one : found.addresses) {
    if (options.for_others && is_only_for_itself(options.host, one)) continue;
    if (auto fd = listen_at(one)) return std::move(*fd);
    if (errno != EADDRNOTAVAIL) unreachable(options, std::strerror(errno), errno);
  }
  if (auto fd = listen_at(Address::any(port))) return std::move(*fd);
  unreachable(options, std::strerror(errno), errno);
}

// One per port and process: its worlds, which come one after the other or at the same time, are in
// one.
std::shared_ptr<StoreServer> serve(const StoreOptions& options,
                                   const std::shared_ptr<const LauncherStatus>& status) {
  static std::mutex mutex;
  struct Served {
    std::weak_ptr<StoreServer> server;
    OwnProcess process;
  };
  static auto& servers = *new std::map<int, Served>;
  const std::lock_guard lock(mutex);
  Served& served = servers[options.port];
  auto running = served.server.lock();
  if (running && served.process.is_here()) {
    if (running->key() == options.key) return running;
    throw ConfigError(
        fmt::format("[store] {}:{} is served by this process already, to ranks that have another "
                    "secret: give each group with a secret of its own another port",
                    options.host, options.port));
  }
  auto server = not_for_children(std::make_shared<StoreServer>(
      listening(options), options.key, [status] { return status->has_reported(); }));
  served = {server, OwnProcess()};
  return server;
}

StoreClient::Deadline after(std::chrono::milliseconds timeout) {
  return StoreClient::Clock::now() + timeout;
}

}  // namespace

// Exceptions of the client become a CommError that says what was tried.
template <class Call>
auto Store::guarded(std::string_view what, std::chrono::milliseconds timeout,
                    const Call& call) const {
  try {
    return call(*client_, after(timeout));
  } catch (const StoreRefusal& error) {
    throw ConfigError(fmt::format("[store] {}: {}", beginning_of(what), error.what()));
  } catch (const StoreGivenUp& error) {
    throw CommError(
        fmt::format("[store] {} at {} {}", beginning_of(what), address(), error.what()));
  } catch (const StoreFailure& error) {
    // The store's server may have ended for the same reason.
    if (launcher_status_->has_reported()) {
      throw CommError(fmt::format("[store] {} at {} {}", beginning_of(what), address(),
                                  launcher_status_->abort_text_with_ends()));
    }
    const bool has_answered = dynamic_cast<const StoreUnset*>(&error) != nullptr;
    throw CommError(
        fmt::format("[store] {} at {} failed: {}; look at whether {} still runs",
                    beginning_of(what), address(), error.what(),
                    has_answered ? "the rank that sets it" : "the process that serves the store"));
  }
}

std::shared_ptr<StoreClient> Store::client(std::chrono::milliseconds timeout,
                                           bool was_there) const {
  return not_for_children(std::make_shared<StoreClient>(
      host_, port_, after(timeout),
      [launcher_status = launcher_status_]() -> std::optional<std::string> {
        if (!launcher_status->has_reported()) return std::nullopt;
        return launcher_status->abort_text_with_ends();
      },
      key_, was_there));
}

Store Store::connect(const StoreOptions& options) {
  Store store;
  store.host_ = options.host;
  store.port_ = options.port;
  store.key_ = options.key;
  store.timeout_ = options.timeout;
  store.launcher_status_ = std::make_shared<LauncherStatus>(options.numbers);
  if (options.server) store.server_ = serve(options, store.launcher_status_);
  try {
    store.client_ = store.client(options.timeout, false);
    // Python's server waits until it has counted all ranks; ours does not: ranks wait for each
    // other when they join a group, with an error that names those that are missing.
    if (!options.server) store.client_->add(kArrivals, 1, after(options.timeout));
  } catch (const StoreRefusal& error) {
    throw ConfigError(
        fmt::format("[store] {} cannot count this rank (key {}): {}; look at what other "
                    "programs keep there, or set MASTER_PORT to a free port on every rank",
                    store.address(), kArrivals, error.what()));
  } catch (const StoreGivenUp& error) {
    throw CommError(fmt::format("[store] the connection to {} {}", store.address(), error.what()));
  } catch (const StoreUnreachable& error) {
    throw CommError(fmt::format("[store] {} cannot be reached: {}", store.address(), error.what()));
  } catch (const StoreFailure& error) {
    unreachable(options, error.what());
  }
  return store;
}

std::string Store::full(const std::string& key) const {
  return std::string(kUsers) + prefix_ + key;
}

std::vector<std::string> Store::full(const std::vector<std::string>& keys) const {
  std::vector<std::string> all;
  for (const std::string& key : keys) all.push_back(full(key));
  return all;
}

void Store::set(const std::string& key, std::string_view value) const {
  guarded("set " + key, timeout_,
          [&](auto& client, auto deadline) { client.set(full(key), value, deadline); });
}

void Store::set_confirmed(const std::string& key, std::string_view value) const {
  guarded("set " + key, timeout_,
          [&](auto& client, auto deadline) { client.set_confirmed(full(key), value, deadline); });
}

std::string Store::get(const std::string& key, std::chrono::milliseconds timeout) const {
  const auto deadline = after(timeout);
  wait({key}, timeout);
  // If another rank removes the key now, this waits for it again: not longer than the caller would,
  // but for the time that an answer may take.
  return guarded("get " + key, timeout_, [&](auto& client, auto) {
    return client.get({full(key)}, std::max(deadline, after(kAnswer))).front();
  });
}

void Store::wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) const {
  guarded(fmt::format("wait for {}", fmt::join(keys, ", ")), timeout,
          [&](auto& client, auto deadline) { client.wait(full(keys), deadline); });
}

bool Store::check(const std::vector<std::string>& keys) const {
  return guarded(fmt::format("check of {}", fmt::join(keys, ", ")), timeout_,
                 [&](auto& client, auto deadline) { return client.check(full(keys), deadline); });
}

int64_t Store::add(const std::string& key, int64_t amount) const {
  return guarded("add to " + key, timeout_, [&](auto& client, auto deadline) {
    return client.add(full(key), amount, deadline);
  });
}

void Store::announce(int64_t ranks) const noexcept {
  // A server that is stopped must not delay a rank that no longer needs it.
  constexpr std::chrono::seconds kLimit{1};
  try {
    if (ranks != 0) client_->add(kMaking, ranks, after(kLimit));
  } catch (const std::exception&) {
    // The store is gone; a call that needs it reports that.
  }
}

Store::Making::Making(Store store, int64_t ranks) : store_(std::move(store)) {
  store_.announce(ranks);
}

void Store::linger() const {
  if (server_) server_->linger();
}

uint64_t Store::requests() const { return server_ ? server_->requests() : 0; }

Store Store::prefix(const std::string& name) const {
  Store store = *this;
  store.prefix_ += name + "/";
  return store;
}

Store Store::clone(std::chrono::milliseconds timeout) const {
  Store store = *this;
  store.timeout_ = timeout;
  store.client_ =
      guarded("a second connection", timeout_, [&](auto&, auto) { return client(timeout_, true); });
  return store;
}

class Store::C10d final : public c10d::Store {
 public:
  explicit C10d(comm::Store store) : c10d::Store(store.timeout_), store_(std::move(store)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<C10d>(store_.clone(timeout_));
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    store_.set(key, text(value));
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& wanted) override {
    return store_.guarded("compare_set " + key, timeout_, [&](auto& client, auto deadline) {
      return bytes(client.compare_set(store_.full(key), text(expected), text(wanted), deadline));
    });
  }
  std::vector<uint8_t> get(const std::string& key) override {
    return bytes(store_.get(key, timeout_));
  }
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }
  bool deleteKey(const std::string& key) override {
    return store_.guarded("delete " + key, timeout_, [&](auto& client, auto deadline) {
      return client.erase(store_.full(key), deadline);
    });
  }
  bool check(const std::vector<std::string>& keys) override { return store_.check(keys); }
  int64_t getNumKeys() override {
    return store_.guarded("count of keys", timeout_,
                          [](auto& client, auto deadline) { return client.count_keys(deadline); });
  }
  void wait(const std::vector<std::string>& keys) override { store_.wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    store_.wait(keys, timeout);
  }

  // With these, Gloo asks for all addresses at once.
  bool hasExtendedApi() const override { return true; }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    store_.guarded("append to " + key, timeout_, [&](auto& client, auto deadline) {
      client.append(store_.full(key), text(value), deadline);
    });
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    store_.wait(keys, timeout_);
    return store_.guarded("multi_get", timeout_, [&](auto& client, auto deadline) {
      std::vector<std::vector<uint8_t>> values;
      for (const std::string& value : client.get(store_.full(keys), deadline))
        values.push_back(bytes(value));
      return values;
    });
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override {
    for (size_t i = 0; i < keys.size(); ++i) set(keys[i], values.at(i));
  }

 private:
  static std::string_view text(const std::vector<uint8_t>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static std::vector<uint8_t> bytes(std::string_view text) { return {text.begin(), text.end()}; }

  const comm::Store store_;
};

c10::intrusive_ptr<c10d::Store> Store::for_c10d() const { return c10::make_intrusive<C10d>(*this); }

}  // namespace lockstep::comm

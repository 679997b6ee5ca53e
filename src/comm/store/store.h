// The key-value store in which ranks find each other: a server in one process (the launcher's or
// rank 0's), clients everywhere. Private.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/health/launcher_status.h"
#include "core/security/token.h"

namespace lockstep::comm {

class StoreClient;
class StoreServer;

struct StoreOptions {
  std::string host;
  int port = 0;
  // Whether this process also runs the server.
  bool server = false;
  // Whether ranks of other hosts come, too.
  bool for_others = true;
  // How long connect() and every later call wait.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // A socket that already listens on `port`, which the server takes over.
  std::optional<int> listen_fd = std::nullopt;
  // A secret of the job: client and server prove to each other that they know it, and everything is
  // encrypted. Python ranks cannot.
  std::optional<Digest> key = std::nullopt;
  // Of ranks that need not be the job's.
  std::optional<LauncherStatus::Numbers> numbers = std::nullopt;
};

// A value handle: copies are the same connection, which any thread may use; a call that waits holds
// up those of other threads. Without a key, anyone who reaches the port may read and write. Every
// call throws CommError that names the store and the key when the server is gone, when the deadline
// passes, and when the launcher reports a failure while it waits. The server lives as long as a
// handle of the process that serves.
class Store {
 public:
  // As torch.distributed's env:// makes it, so that Python ranks use the same store, served by them
  // or by this library. Throws CommError with the address and what to do;
  // ConfigError where the store is full, or its count of ranks is something else.
  static Store connect(const StoreOptions& options);

  // Does not wait for the server.
  void set(const std::string& key, std::string_view value) const;
  // Returns when the server has it; throws ConfigError when it is full.
  void set_confirmed(const std::string& key, std::string_view value) const;
  // The value; blocks until some rank has set the key.
  std::string get(const std::string& key, std::chrono::milliseconds timeout) const;
  // Blocks until all keys have been set.
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) const;
  // Whether all keys have been set. Does not wait.
  bool check(const std::vector<std::string>& keys) const;
  // Adds to the number under `key`, which starts at 0; returns the sum. Throws ConfigError when the
  // value is not a number, or the store is full.
  int64_t add(const std::string& key, int64_t amount) const;

  // While ranks make a group by way of the store, the process that serves it may exit: it serves on
  // until none does, for five seconds at most.
  class Making;
  // This many more ranks form a group, or will; fewer, where it is negative.
  void announce(int64_t ranks) const noexcept;

  // The same store seen through keys that begin with `name` and "/".
  Store prefix(const std::string& name) const;
  // What all keys begin with in this view of the store.
  const std::string& keys() const { return prefix_; }
  // The same keys over a connection of its own, so that neither waits for the other. Fails at once
  // when the server has ended.
  Store clone(std::chrono::milliseconds timeout) const;
  // The same for c10d's groups.
  c10::intrusive_ptr<c10d::Store> for_c10d() const;

  // Where this process serves, blocks as long as ranks make a group: five seconds at most.
  void linger() const;

  // Requests that the server has answered, where this process serves; 0 elsewhere.
  uint64_t requests() const;

  // The launcher's status, which all calls that wait check. Never null.
  const std::shared_ptr<const LauncherStatus>& launcher_status() const { return launcher_status_; }
  // "10.0.0.1:29500".
  std::string address() const { return host_ + ":" + std::to_string(port_); }
  const std::string& host() const { return host_; }
  int port() const { return port_; }

 private:
  class C10d;

  Store() = default;
  std::string full(const std::string& key) const;
  std::vector<std::string> full(const std::vector<std::string>& keys) const;
  template <class Call>
  auto guarded(std::string_view what, std::chrono::milliseconds timeout, const Call& call) const;
  std::shared_ptr<StoreClient> client(std::chrono::milliseconds timeout, bool was_there) const;

  std::shared_ptr<StoreServer> server_;
  std::shared_ptr<StoreClient> client_;
  std::shared_ptr<const LauncherStatus> launcher_status_;
  std::string host_;
  int port_ = 0;
  std::optional<Digest> key_;
  std::chrono::milliseconds timeout_{};
  std::string prefix_;
};

// Announces that this rank forms a group while it lives. Never throws: a later call reports a store
// that is gone.
class Store::Making {
 public:
  // Announces this many ranks: this one, all, or none where another rank announces this one, too.
  Making(Store store, int64_t ranks);
  ~Making() { store_.announce(-1); }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

 private:
  const Store store_;
};

}  // namespace lockstep::comm

#include "lockstep/comm/join.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "comm/host/interfaces.h"
#include "comm/store/store.h"
#include "comm/text.h"
#include "comm/world/connect.h"
#include "comm/world/rendezvous.h"
#include "core/network/address.h"
#include "core/process/descriptors.h"
#include "core/process/standard_streams.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;

constexpr const char* kJoin = "join";  // in place of a job's name

void check(const Membership& me, Backend asked) {
  if (me.rank < 0 || me.rank >= me.size) {
    throw ConfigError(
        fmt::format("[comm] join: rank {} of {}: ranks are numbered from 0", me.rank, me.size));
  }
  if (!me.world_ranks.empty() && me.world_ranks.size() != static_cast<size_t>(me.size)) {
    throw ConfigError(fmt::format("[comm] join: {} world_ranks for a group of {}",
                                  me.world_ranks.size(), me.size));
  }
  if (asked == Backend::Nccl || asked == Backend::CudaIpc) {
    throw ConfigError(fmt::format(
        "[comm] join: the {} backend was asked for, but such a group is for tensors on the CPU: "
        "use World::from_env()",
        name_of(asked)));
  }
}

LauncherStatus::Numbers numbers_of(const Membership& me) {
  return {.of_job = me.world_ranks, .own = me.rank};
}

std::string said(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> value = store.get(key);
  return {value.begin(), value.end()};
}

void say(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

constexpr const char* kWhere = "lockstep/store";
std::string key_of_host(int rank) { return fmt::format("lockstep/host/{}", rank); }

// Each rank's description of its host. Only rank 0 asks, so that the number of requests grows with
// the number of ranks.
std::vector<std::string> hosts_of_all(c10d::Store& store, int size, milliseconds timeout) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(key_of_host(rank));
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    std::vector<int> missing;
    for (int rank = 0; rank < size; ++rank) {
      if (!store.check({keys[rank]})) missing.push_back(rank);
    }
    throw CommError(fmt::format("[comm] join: {} of {} ranks have not come within {}: {} ({})",
                                missing.size(), size, text_of(timeout), fmt::join(missing, ", "),
                                first_line(error)));
  }
  std::vector<std::string> hosts;
  for (const std::string& key : keys) hosts.push_back(said(store, key));
  return hosts;
}

// At which address ranks of other hosts reach this one.
std::string address_for_others() {
  if (const auto names = env_text("GLOO_SOCKET_IFNAME")) {
    const std::string first = names->substr(0, names->find(','));
    if (const auto address = address_of_interface(first)) return *address;
    throw CommError(fmt::format(
        "[comm] join: GLOO_SOCKET_IFNAME={}, and this host has no interface of that name with an "
        "address",
        *names));
  }
  if (const auto master = env_text("MASTER_ADDR")) {
    if (const auto address = address_towards(*master, 1); address && !is_loopback(*address))
      return *address;
  }
  for (const Address& one : resolve(host_name(), 0).addresses) {
    if (!one.is_loopback()) return one.host();
  }
  for (const Address& one : own_addresses()) {
    if (!one.is_loopback()) return one.host();
  }
  return "127.0.0.1";
}

// A store of this library, which rank 0 serves and whose address it publishes in `theirs`: its
// errors name missing ranks, and its waits check the launcher's status.
Store serve_for(c10d::Store& theirs, const Membership& me, const std::string& host,
                milliseconds timeout) {
  StoreOptions options{.timeout = timeout, .numbers = numbers_of(me)};
  say(theirs, key_of_host(me.rank), host);
  if (me.rank == 0) {
    const auto hosts = hosts_of_all(theirs, me.size, timeout);
    bool is_one = true;
    for (const std::string& other : hosts) is_one = is_one && other == host;
    options.host = is_one ? "127.0.0.1" : address_for_others();
    const Resolved at = resolve(options.host, 0);
    auto listening = listen_at(at.addresses.empty() ? Address::any(0) : at.addresses.front());
    if (!listening) {
      throw CommError(fmt::format("[comm] join: rank 0 cannot listen at {}", options.host));
    }
    options.port = local_address(listening->get()).port();
    options.server = true;
    options.key = random_bytes();
    options.listen_fd = listening->release();
    Store store = Store::connect(options);
    say(theirs, kWhere, fmt::format("{} {} {}", options.port, hex_of(*options.key), options.host));
    return store;
  }
  try {
    theirs.wait({kWhere}, timeout);
  } catch (const std::exception& error) {
    throw CommError(fmt::format(
        "[comm] join: rank {} of {} had no answer from rank 0 within {}: was it started, and have "
        "all others come? ({})",
        me.rank, me.size, text_of(timeout), first_line(error)));
  }
  std::istringstream where(said(theirs, kWhere));
  std::string key;
  where >> options.port >> key >> options.host;
  options.key = digest_of_hex(key);
  if (!where || !options.key)
    throw CommError("[comm] join: rank 0's key 'lockstep/store' was written by another version");
  return Store::connect(options);
}

// So that these ranks may form another group by the same keys, as after destroy_process_group().
// Not every store can do it.
void remove(c10d::Store& theirs, const std::string& key) {
  try {
    theirs.deleteKey(key);
  } catch (const std::exception&) {
  }
}

// `leave` removes from a store what others have read.
template <class Leave>
Group meet(const Store& own, const Membership& me, Member mine, const Asked& asked,
           const Leave& leave) {
  const Store::Making making(own, me.rank == 0 ? me.size : 0);
  const auto members = exchange_members(own, me.rank, std::move(mine), asked.timeout);
  Group group = connect(own, me.rank, members, asked).group;
  leave();  // before any rank can join again
  // Until then others may read rank 0's store, which may be destroyed when this call returns.
  group.barrier({.label = "join"}).wait();
  return group;
}

// What all joins do before they have a store, and after.
template <class MakeStore, class Leave>
Group join_over(const Membership& me, const GroupOptions& options, const MakeStore& make_store,
                const Leave& leave) {
  open_standard_streams();
  const Backend asked = backend_from_env(options.backend);
  check(me, asked);
  const milliseconds timeout = checked_timeout("join", options.timeout);
  if (me.size == 1) return Group();
  survive_broken_connections();
  raise_descriptor_limit();
  const bool over_tcp = asked == Backend::Tcp || (net_from_env() && asked != Backend::Gloo);
  Asked transport{.backend = asked,
                  .over_tcp = over_tcp,
                  .tls = options.tls,
                  .secret = options.secret,
                  .timeout = timeout};
  transport.tls_key = tls_key_from_env(transport, kJoin);
  Member mine = this_member(me.size, -1, Devices{}, shared_part(transport));
  const Store store = make_store(mine.host, timeout);
  return meet(store, me, std::move(mine), transport, leave);
}

}  // namespace

Group join_group(const c10::intrusive_ptr<c10d::Store>& store, const Membership& me,
                 const GroupOptions& options) {
  bool is_served = false;
  const auto remove_address = [&] {
    if (is_served) remove(*store, kWhere);
  };
  try {
    return join_over(
        me, options,
        [&](const std::string& host, milliseconds timeout) {
          Store own = serve_for(*store, me, host, timeout);
          is_served = me.rank == 0;
          return own;
        },
        [&] {
          remove_address();
          remove(*store, key_of_host(me.rank));
        });
  } catch (...) {
    remove_address();
    throw;
  }
}

Group join_group(const std::string& address, const Membership& me, const GroupOptions& options) {
  const Endpoint at = Endpoint::parse("join", address, 29500);
  const auto make_store = [&](const std::string&, milliseconds timeout) {
    static std::mutex mutex;
    static auto& calls = *new std::map<std::string, int>;
    Store store = Store::connect({.host = at.host,
                                  .port = at.port,
                                  .server = me.rank == 0,
                                  .timeout = timeout,
                                  .key = common_key({.secret = options.secret}, kJoin),
                                  .numbers = numbers_of(me)});
    // For later calls. Its destructor, before the process exits, waits for ranks that still form a
    // group.
    static std::map<std::string, Store> served;
    const std::lock_guard lock(mutex);
    if (me.rank == 0) served.insert_or_assign(at.text(), store);
    return store.prefix(fmt::format("lockstep/join/{}", calls[at.text()]++));
  };
  return join_over(me, options, make_store, [] {});
}

}  // namespace lockstep::comm

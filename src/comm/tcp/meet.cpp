// How the ranks of a world find each other's addresses.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>

#include "comm/host/interfaces.h"
#include "comm/tcp/transport.h"
#include "comm/text.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kSecret = "secret";

std::string address_that_was_asked_for(const std::string& interfaces) {
  const std::string first = interfaces.substr(0, interfaces.find(','));
  if (const auto address = address_of_interface(first)) return *address;
  throw CommError(fmt::format(
      "[tcp] start: could not connect to the others: GLOO_SOCKET_IFNAME={}, and this host has no "
      "interface of that name with an address",
      interfaces));
}

// The entries of a list, by rank.
std::vector<std::optional<std::string>> said_in(const std::string& list, int size) {
  std::vector<std::optional<std::string>> said(static_cast<size_t>(size));
  std::istringstream lines(list);
  for (std::string line; std::getline(lines, line);) {
    said.at(static_cast<size_t>(std::stoi(line))) = line.substr(line.find(' ') + 1);
  }
  return said;
}

[[noreturn]] void name_the_missing(const Store& store, const std::string& list, int rank, int size,
                                   milliseconds spent) {
  std::vector<std::string> missing;
  const auto said = said_in(store.get(list, milliseconds(1000)), size);
  for (int peer = 0; peer < size; ++peer) {
    if (said[static_cast<size_t>(peer)]) continue;
    const auto end = store.launcher_status()->fate(peer);
    missing.push_back(end ? fmt::format("rank {} {}", peer, *end) : fmt::format("rank {}", peer));
  }
  throw CommError(fmt::format(
      "[tcp] start: {} of {} ranks had not come to the store at {} {} after {} on rank {}: {}; "
      "look at their output, and whether every rank was started with the same MASTER_ADDR, "
      "MASTER_PORT and WORLD_SIZE",
      missing.size(), size, store.address(),
      store.launcher_status()->has_reported()
          ? "when the job " + store.launcher_status()->abort_text()
          : "at the deadline",
      text_of(spent), rank, fmt::join(missing, ", ")));
}

// What each rank has published under `name`, by rank: one list to which each appends, and one key
// that the last sets, so that a rank makes four requests for any number of ranks.
std::vector<std::string> tell_all(const Store& store, const std::string& name, int rank, int size,
                                  const std::string& own, milliseconds timeout) {
  const auto start = Clock::now();
  const std::string line = fmt::format("{} {}\n", rank, own), over = name + "/over";
  store.for_c10d()->append(name, {line.begin(), line.end()});
  if (store.add(name + "/come", 1) == size) store.set(over, "");
  try {
    store.wait({over}, timeout);
  } catch (const CommError&) {
    // The launcher's report says more, and a store on a lost host would not answer.
    if (store.launcher_status()->has_reported()) throw;
    // Throws when the store is gone.
    if (!store.check({over})) {
      const auto spent = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
      name_the_missing(store, name, rank, size, spent);
    }
  }
  std::vector<std::string> all;
  for (auto& said : said_in(store.get(name, timeout), size)) all.push_back(std::move(said.value()));
  return all;
}

// The address at which other ranks reach this one.
std::string own_address(const Store& store, int rank, int size, milliseconds timeout) {
  const auto interfaces = env_text("GLOO_SOCKET_IFNAME");
  std::string own = interfaces ? address_that_was_asked_for(*interfaces)
                               : address_towards(store.host(), store.port()).value_or("127.0.0.1");
  const auto places = tell_all(store, "places", rank, size, own, timeout);
  if (!is_loopback(own) || interfaces) return own;
  // The store is on this host, yet ranks of other hosts are not: use the address they know.
  for (const std::string& other : places) {
    if (!is_loopback(other)) return address_towards(other, store.port()).value_or(own);
  }
  return own;
}

}  // namespace

std::shared_ptr<Net> make_net(const Store& store, int rank, int size, milliseconds timeout,
                              const std::optional<Digest>& tls_key) {
  const auto start = Clock::now();
  const auto left = [&] {
    const auto spent = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
    return std::max(milliseconds(1), timeout - spent);
  };
  // Known only to processes that can read the store.
  if (rank == 0) store.set(kSecret, hex_of(random_bytes()));
  const std::string own = own_address(store, rank, size, timeout);
  auto secret = digest_of_hex(store.get(kSecret, left()));
  if (!secret) throw CommError("[tcp] start: rank 0 has put no secret into the store");
  // So that a store which others may read, such as torchrun's, is enough.
  if (tls_key) secret = hmac(lockstep::text_of(*tls_key), {"net", lockstep::text_of(*secret)});
  auto net = std::make_shared<Net>(
      rank, own, *secret,
      NetOptions{
          .payload = tls_key ? NetPayload::Encrypted : NetPayload::Plain,
          .deadline = timeout,
          .is_job_over = [status = store.launcher_status()] { return status->has_reported(); }});
  net->meet(tell_all(store, "addresses", rank, size, net->own_address(), left()));
  return net;
}

}  // namespace lockstep::comm

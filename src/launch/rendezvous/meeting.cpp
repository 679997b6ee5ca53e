#include "launch/rendezvous/meeting.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/process/descriptors.h"
#include "launch/job/background.h"

namespace lockstep::launch {
namespace {

using namespace std::chrono_literals;

constexpr uint16_t kDefaultPort = 29400;  // torchrun's

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1e3; }

// How long an address or a route may take to come; a name may for the join timeout.
constexpr auto kNetworkComesUp = std::chrono::milliseconds(10s);

// What a host does not have yet when it starts.
class Patience {
 public:
  Patience(std::chrono::milliseconds time, Session& session)
      : session_(session), until_(std::chrono::steady_clock::now() + time) {}

  // Whether it is to be tried again, after a while. False when the time is over, and after a
  // signal.
  bool waits_until(const std::string& what) {
    if (signal_ || std::chrono::steady_clock::now() >= until_) return false;
    if (std::exchange(said_, what) != what) session_.output.say("waiting until " + what);
    signal_ = session_.pause(500ms);
    return !signal_;
  }
  std::optional<int> signal() const { return signal_; }
  // As resolve_in_background().
  std::vector<Address> addresses_of(const Endpoint& endpoint) {
    Outcome outcome;
    auto found = resolve_in_background(session_, outcome, endpoint);
    signal_ = outcome.signal;
    return found;
  }

 private:
  Session& session_;
  const std::chrono::steady_clock::time_point until_;
  std::string said_;
  std::optional<int> signal_;
};

// The addresses of `host` once its name can be resolved; none after a signal.
std::vector<Address> resolve_in_time(const Endpoint& endpoint, const Rendezvous& rendezvous,
                                     Patience& patience) {
  for (;;) {
    auto found = patience.addresses_of(endpoint);
    if (!found.empty()) return found;
    if (patience.waits_until(fmt::format("the name of the host '{}' is known", endpoint.host))) {
      continue;
    }
    if (patience.signal()) return {};
    throw ConfigError(fmt::format(
        "[run] --rdzv-endpoint {}: the host '{}' is not known after {:g} s: is the name right, "
        "and in this host's DNS or /etc/hosts?",
        endpoint.text(), endpoint.host, seconds(rendezvous.join_timeout)));
  }
}

// A socket of the coordinator; none, with errno set, when it cannot listen there. The kernel looks
// for a second or two whether another host has a new IPv6 address, too.
std::optional<Fd> listen_in_time(const Address& wanted, Patience& patience) {
  for (;;) {
    auto socket = listen_at(wanted, SOCK_NONBLOCK);
    const int error = errno;
    const bool is_new = !socket && error == EADDRNOTAVAIL && is_own(wanted);
    if (!is_new || !patience.waits_until(fmt::format("this host may use its address {}: {}",
                                                     wanted.host(), std::strerror(error)))) {
      errno = error;
      return socket;
    }
  }
}

// This host's address towards the first of `found` that it has a route to; nothing, with errno set,
// when there is none in time.
std::optional<Address> source_in_time(const std::vector<Address>& found, Patience& patience) {
  for (;;) {
    for (const Address& one : found) {
      if (const auto own = source_towards(one)) return own;
    }
    const int error = errno;
    const bool is_down = error == ENETUNREACH || error == EADDRNOTAVAIL;
    if (!is_down ||
        !patience.waits_until(fmt::format("{} can be reached from here: {}", found.front().host(),
                                          std::strerror(error)))) {
      errno = error;
      return std::nullopt;
    }
  }
}

std::vector<std::string> hosts_of(const std::vector<Address>& addresses) {
  std::vector<std::string> hosts;
  for (const Address& one : addresses) hosts.push_back(one.host());
  return hosts;
}

// The endpoint's address, where this host has it and others can reach it. Debian gives a host its
// own name as 127.0.1.1, which no other host can reach.
Address address_of_coordinator(const Endpoint& endpoint, const std::vector<Address>& found) {
  const auto outward = std::find_if(found.begin(), found.end(), [](const Address& one) {
    return !one.is_loopback() && is_own(one);
  });
  if (outward != found.end()) return *outward;
  if (!is_own(found.front())) return found.front();  // the error comes from listening
  const bool meant = endpoint.host == "localhost" || found.front().host() == endpoint.host;
  if (meant) return found.front();
  std::vector<Address> others, others_v6;
  for (const Address& one : own_addresses()) {
    if (one.is_loopback() || one.is_link_local()) continue;
    (one.storage.ss_family == AF_INET ? others : others_v6).push_back(one);
  }
  if (others.empty()) others = std::move(others_v6);
  if (others.size() == 1) return others.front().with_port(endpoint.port);
  throw ConfigError(fmt::format(
      "[run] --rdzv-endpoint {}: this host knows itself under that name as {}, where no other host "
      "reaches it; say which of its {} addresses is meant (--local-addr): {}",
      endpoint.text(), found.front().host(), others.size(), fmt::join(hosts_of(others), ", ")));
}

// A name may have addresses in several networks, one of which the others cannot reach.
std::string remark_on_several(const Endpoint& endpoint, const std::vector<Address>& found,
                              const Address& chosen) {
  std::vector<std::string> own;
  for (const Address& one : found) {
    const bool is_alike = one.storage.ss_family == chosen.storage.ss_family && is_own(one);
    if (is_alike && !one.is_loopback()) own.push_back(one.host());
  }
  if (own.size() < 2) return "";
  return fmt::format(
      "the host '{}' has several addresses ({}): the coordinator listens at {} only; where the "
      "others cannot reach that, give --rdzv-endpoint an address, or --local-addr here",
      endpoint.host, fmt::join(own, ", "), chosen.host());
}

// Several hosts may have one of the addresses, and take themselves for the one that is meant.
std::string remark_on_foreign(const Endpoint& endpoint, std::vector<Address> found,
                              const Address& chosen) {
  std::erase_if(found, is_own);
  if (found.empty()) return "";
  return fmt::format(
      "the host '{}' has the address {} of this host, and {}, which this host has not: this "
      "launcher takes itself for the coordinator; where another host is meant, and the first is an "
      "address that many hosts have (docker0's), give --rdzv-endpoint an address, or --rdzv-conf "
      "is_host=0 here",
      endpoint.host, chosen.host(), fmt::join(hosts_of(found), ", "));
}

// Of --local-addr, which may be a name; none without it, and after a signal.
std::optional<Address> given_address(const std::string& text, Patience& patience) {
  if (text.empty()) return std::nullopt;
  const auto found = patience.addresses_of({text, 0});
  const auto own = std::find_if(found.begin(), found.end(), is_own);
  if (own != found.end()) return *own;
  if (patience.signal()) return std::nullopt;
  throw ConfigError(fmt::format("[run] --local-addr {}: not an address of this host", text));
}

// A coordinator without descriptors would make the other launchers wait.
void check_descriptors(int hosts) {
  const auto [used, limit] = descriptors();
  constexpr int kSpare = 16;
  if (used + hosts + kSpare <= limit) return;
  throw ConfigError(
      fmt::format("[run] --nnodes {}: the coordinator keeps a connection with each host, but {} of "
                  "at most {} descriptors are in use: raise the limit (ulimit -n, "
                  "LimitNOFILE= of systemd, --ulimit nofile= of a container)",
                  hosts, used, limit));
}

}  // namespace

Endpoint meeting_place(const Rendezvous& rendezvous) {
  if (rendezvous.endpoint.empty()) {
    throw ConfigError(
        "[run] several hosts need a place to meet: --rdzv-endpoint HOST:PORT, or --master-addr "
        "with --node-rank, the same on each");
  }
  const Endpoint endpoint = Endpoint::parse("--rdzv-endpoint", rendezvous.endpoint, kDefaultPort);
  // A launcher that --rdzv-conf makes the coordinator may take any port, for launchers that get its
  // number later.
  if (endpoint.port == 0 && !rendezvous.is_host.value_or(false)) {
    throw ConfigError(fmt::format(
        "[run] --rdzv-endpoint '{}': give HOST or HOST:PORT, with a port that all hosts know",
        rendezvous.endpoint));
  }
  return endpoint;
}

Meeting prepare_meeting(const Rendezvous& rendezvous, Session& session) {
  const Endpoint endpoint = meeting_place(rendezvous);
  Meeting meeting{.coordinator = endpoint.text()};
  Patience patience(rendezvous.join_timeout, session);
  const auto found = resolve_in_time(endpoint, rendezvous, patience);
  meeting.signal = patience.signal();
  if (meeting.signal) return meeting;
  const auto given = given_address(rendezvous.local_addr, patience);
  meeting.signal = patience.signal();
  if (meeting.signal) return meeting;
  Patience network(std::min(rendezvous.join_timeout, kNetworkComesUp), session);
  const bool must = rendezvous.is_host.value_or(rendezvous.node_rank == 0);
  const bool may = rendezvous.is_host || rendezvous.node_rank
                       ? must
                       : std::any_of(found.begin(), found.end(), is_own);
  if (may) {
    const Address wanted =
        given ? given->with_port(endpoint.port) : address_of_coordinator(endpoint, found);
    auto socket = listen_in_time(wanted, network);
    meeting.signal = network.signal();
    if (meeting.signal) return meeting;
    if (!socket && (must || errno != EADDRINUSE)) {
      throw ConfigError(
          fmt::format("[run] cannot listen at {}:{}, where the launchers are to meet: {}",
                      wanted.host(), endpoint.port, std::strerror(errno)));
    }
    if (socket) {
      check_descriptors(rendezvous.max_nodes);
      meeting.is_coordinator = true;
      meeting.own = local_address(socket->get());
      meeting.socket = std::move(*socket);
      meeting.coordinator = Endpoint{meeting.own.host(), meeting.own.port()}.text();
      const std::string remark = given ? "" : remark_on_several(endpoint, found, meeting.own);
      if (!remark.empty()) session.output.say(remark);
      const bool is_told = rendezvous.is_host || rendezvous.node_rank || given;
      const std::string doubt = is_told ? "" : remark_on_foreign(endpoint, found, meeting.own);
      if (!doubt.empty()) session.output.say(doubt);
      session.tell("listening at " + meeting.coordinator + ": this launcher is the coordinator");
      return meeting;
    }
    meeting.port_is_held = true;
  }
  std::optional<Address> own = given;
  if (!own) own = source_in_time(found, network);
  meeting.signal = network.signal();
  if (meeting.signal) return meeting;
  if (!own) {
    throw ConfigError(fmt::format("[run] --rdzv-endpoint {}: {} cannot be reached from here: {}",
                                  endpoint.text(), found.front().host(), std::strerror(errno)));
  }
  meeting.own = *own;
  session.tell(
      fmt::format("this host is {}; the coordinator is at {}", own->host(), meeting.coordinator));
  return meeting;
}

}  // namespace lockstep::launch

// Where rank 0's store is when an mpirun has started ranks on several hosts: rank 0 listens, and
// says where over mpirun's process manager.
#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <vector>

#include "core/network/address.h"
#include "core/place/exchange.h"
#include "core/place/secret.h"
#include "core/place/sources.h"
#include "core/security/token.h"
#include "lockstep/core/environment.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// Those of interfaces that lead to other hosts.
std::vector<std::string> outward_addresses() {
  std::vector<std::string> addresses;
  for (const Address& one : own_addresses()) {
    if (one.storage.ss_family == AF_INET && !one.is_loopback()) addresses.push_back(one.host());
  }
  return addresses;
}

// The names by which mpirun knows this host, and the addresses of its daemon here: names and
// addresses, the best first.
std::vector<std::string> what_mpirun_says() {
  std::vector<std::string> names;
  if (const auto name = env_text("MPIR_CVAR_CH3_INTERFACE_HOSTNAME")) names.push_back(*name);
  // "801767424.0;tcp://10.77.0.1,192.168.0.1:51275"
  const std::string uri = env_text("OMPI_MCA_orte_local_daemon_uri").value_or("");
  const size_t begin = uri.find("tcp://");
  if (begin != std::string::npos) {
    const std::string list = uri.substr(begin + 6, uri.find_first_of(":;", begin + 6) - begin - 6);
    for (size_t at = 0; at <= list.size();) {
      const size_t end = std::min(list.find(',', at), list.size());
      names.push_back(list.substr(at, end - at));
      at = end + 1;
    }
  }
  return names;
}

// The one under which the other hosts reach this one.
std::string outward_address() {
  const auto own = outward_addresses();
  for (const std::string& name : what_mpirun_says()) {
    const auto found = resolve(name, 0).addresses;
    if (!found.empty() && std::ranges::find(own, found.front().host()) != own.end()) {
      return found.front().host();
    }
  }
  if (own.size() == 1) return own.front();
  contradiction(
      "rank 0's host has {} addresses, and mpirun does not say which one the others reach: set "
      "MASTER_ADDR and MASTER_PORT for all ranks",
      own.size());
}

}  // namespace

bool can_meet_over_mpirun(const Place& place) {
  // A program that uses MPI itself needs the only connection to the process manager for MPI_Init().
  if (dlsym(RTLD_DEFAULT, "MPI_Init") != nullptr) return false;
  return place.source == "MPICH" ? env_text("PMI_FD").has_value()
                                 : place.source == "Open MPI" && env_text("PMIX_RANK");
}

void meet_over_mpirun(Place& place) {
  std::string word;
  if (place.rank == 0) {
    place.host = outward_address();
    auto socket = listen_at(resolve(place.host, 0, AI_NUMERICHOST).addresses.front());
    if (!socket) contradiction("rank 0 cannot listen at {}: {}", place.host, std::strerror(errno));
    place.port = local_address(socket->get()).port();
    place.listen_fd = socket->release();
    word = fmt::format("{}:{}", place.host, place.port);
    if (!has_given_secret()) word += ":" + hex_of(random_bytes());
  }
  const auto timeout =
      std::chrono::seconds(env_int("LOCKSTEP_TIMEOUT", 1, 7 * 24 * 3600).value_or(300));
  const std::string heard =
      place.source == "MPICH"
          ? exchange_over_pmi(required("PMI_FD", "PMI_RANK", 3, kMostRanks), word, timeout)
          : exchange_over_pmix(word, timeout);
  const size_t colon = heard.find(':'), second = std::min(heard.find(':', colon + 1), heard.size());
  const char* const end = heard.data() + second;
  if (colon == std::string::npos ||
      std::from_chars(heard.data() + colon + 1, end, place.port).ptr != end || place.port < 1 ||
      place.port > 65535) {
    contradiction("rank 0 is said to be at '{}'", heard.substr(0, second));
  }
  place.host = heard.substr(0, colon);
  if (second < heard.size()) place.secret = heard.substr(second + 1);
}

}  // namespace lockstep

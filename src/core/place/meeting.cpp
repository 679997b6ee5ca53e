// Where ranks of several hosts meet that an mpirun has started: rank 0 listens, and says where over
// mpirun's process manager.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <vector>

#include "core/place/exchange.h"
#include "core/place/sources.h"
#include "lockstep/core/environment.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

std::string text_of(const in_addr& address) {
  char text[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &address, text, sizeof text);
  return text;
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    const bool usable = one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET &&
                        (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (!usable) continue;
    addresses.push_back(text_of(reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr));
  }
  return addresses;
}

// What mpirun calls this host, or where its own daemon here is reached by the others: names and
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

std::optional<std::string> address_of(const std::string& name) {
  addrinfo wanted{};
  wanted.ai_family = AF_INET;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.c_str(), nullptr, &wanted, &found) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  return text_of(reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr);
}

// The one under which the other hosts reach this one.
std::string outward_address() {
  const auto own = own_addresses();
  for (const std::string& name : what_mpirun_says()) {
    const auto address = address_of(name);
    if (address && std::find(own.begin(), own.end(), *address) != own.end()) return *address;
  }
  if (own.size() == 1) return own.front();
  contradiction(
      "rank 0's host has {} addresses, and mpirun does not say which one the others reach: set "
      "MASTER_ADDR and MASTER_PORT for all ranks",
      own.size());
}

// A socket that listens there, at a port that nobody else has.
int listen_at(const std::string& host, int& port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  socklen_t length = sizeof address;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    const int error = errno;
    if (fd >= 0) close(fd);
    contradiction("rank 0 cannot listen at {}: {}", host, std::strerror(error));
  }
  port = ntohs(address.sin_port);
  return fd;
}

}  // namespace

bool can_meet_over_mpirun(const Place& place) {
  // A program of MPI's own needs the one conversation with the process manager for MPI_Init().
  if (dlsym(RTLD_DEFAULT, "MPI_Init") != nullptr) return false;
  return place.source == "MPICH" ? env_text("PMI_FD").has_value()
                                 : place.source == "Open MPI" && env_text("PMIX_RANK");
}

void meet_over_mpirun(Place& place) {
  std::string word;
  if (place.rank == 0) {
    place.host = outward_address();
    place.listen_fd = listen_at(place.host, place.port);
    word = fmt::format("{}:{}", place.host, place.port);
  }
  const auto timeout =
      std::chrono::seconds(env_int("LOCKSTEP_TIMEOUT", 1, 7 * 24 * 3600).value_or(300));
  const std::string heard =
      place.source == "MPICH"
          ? exchange_over_pmi(required("PMI_FD", "PMI_RANK", 3, kMostRanks), word, timeout)
          : exchange_over_pmix(word, timeout);
  const size_t colon = heard.rfind(':');
  const char* const end = heard.data() + heard.size();
  if (colon == std::string::npos ||
      std::from_chars(heard.data() + colon + 1, end, place.port).ptr != end || place.port < 1 ||
      place.port > 65535) {
    contradiction("rank 0 is said to be at '{}'", heard);
  }
  place.host = heard.substr(0, colon);
}

}  // namespace lockstep

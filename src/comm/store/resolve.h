// The addresses that a host's name stands for.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <memory>
#include <string>

namespace lockstep::comm {

struct Found {
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses{nullptr, freeaddrinfo};
  int error = 0;  // getaddrinfo's, 0 when there are addresses
};

// May ask a name server, for as long as the system's resolver sees fit; not with AI_NUMERICHOST in
// `flags`, with which only addresses are known.
inline Found look_up(const std::string& host, int port, int flags = 0) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  Found found;
  found.error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &list);
  if (found.error == 0) found.addresses.reset(list);
  return found;
}

}  // namespace lockstep::comm

// A group of one rank over NCCL. World::from_env() makes none, since a rank alone has nobody to
// send anything to; but it is all that one GPU can show of NCCL, which refuses two ranks on it.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

#include "comm/nccl/transport.h"
#include "comm/store/store.h"
#include "comm/transport.h"
#include "lockstep/comm/world.h"

namespace lockstep::test {

inline Group nccl_of_one(at::Device device) {
  using namespace comm;
  const auto check = [](int result, const char* what) {
    if (result < 0) throw std::system_error(errno, std::generic_category(), what);
    return result;
  };
  const int socket_fd = check(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  check(bind(socket_fd, reinterpret_cast<sockaddr*>(&address), length), "bind");
  check(listen(socket_fd, 8), "listen");
  check(getsockname(socket_fd, reinterpret_cast<sockaddr*>(&address), &length), "getsockname");
  const Store store = Store::connect({.host = "127.0.0.1",
                                      .port = ntohs(address.sin_port),
                                      .server = true,
                                      .for_others = false,
                                      .listen_fd = socket_fd});
  const Topology layout{.members = {0}, .hosts = {"this"}, .doors = {""}};
  return Group(make_nccl_transport(store.prefix("nccl"), make_solo_transport(),
                                   {device, layout, std::chrono::minutes(1)}));
}

}  // namespace lockstep::test

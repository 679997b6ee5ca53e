// CPU ranks of several hosts, over TCP connections of our own (docs/transports.md).
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "comm/net/net.h"
#include "comm/store/store.h"
#include "comm/transport.h"
#include "core/security/token.h"

namespace lockstep::comm {

struct TcpOptions {
  // The deadline of every wait.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // The world's numbers of the group's ranks.
  std::vector<int> members = {};
  // For a group that adds up sums of hosts: of the tree over `ranks` ranks, member m contributes
  // nodes[m]. An all_reduce then takes them as its inputs, one tensor a node, and puts the result
  // into its output, which may be one of them; a reduce_scatter takes node after node, size()
  // tensors each. Empty: every member is one rank.
  std::vector<std::vector<Range>> nodes = {};
  int ranks = 0;
};

// Every rank of the world calls it once; blocks until all have come, each with its address in the
// store. Each listens at the address from which it talks to the store, or that of the first
// interface in GLOO_SOCKET_IFNAME, and serves only ranks that can read the store. With a secret of
// the job, which all ranks have then, only those that know it, too, and everything is encrypted.
// Throws CommError that names who is missing.
std::shared_ptr<Net> make_net(const Store& store, int rank, int size,
                              std::chrono::milliseconds timeout,
                              const std::optional<Digest>& tls_key);

// Every member calls it, with a store under the same prefix, which no other group of the world has.
// Connections are made when they are needed.
std::shared_ptr<Transport> make_tcp_transport(std::shared_ptr<Net> net, const Store& store,
                                              int rank, const TcpOptions& options);

}  // namespace lockstep::comm
